{{- define "culvert-agent.name" -}}culvert-agent{{- end }}

{{/* Program of the chart in the image `culvert`. */}}
{{- define "culvert-agent.program" -}}culvert-agent{{- end }}

{{/* Labels of the workload and of its pods, beside the labels of all objects. */}}
{{- define "culvert-agent.appLabels" -}}
app: konnectivity-agent
k8s-app: konnectivity-agent
{{- end }}

{{/* Folder of the token, the CA of the servers and the client certificate. */}}
{{- define "culvert-agent.credentials" -}}/var/run/secrets/tokens{{- end }}

{{/* The stock agent of KKP's version knows every argument that `compat` leaves in place. */}}
{{- define "culvert-agent.args" -}}
{{- $v := .Values -}}
{{- $folder := include "culvert-agent.credentials" . -}}
{{- $openvpn := or $v.openvpn.remotes $v.openvpn.configMap -}}
{{- $args := list "--logtostderr=true" (printf "-v=%d" (int $v.log.verbosity)) -}}
{{- if not $v.compat }}{{ $args = append $args (printf "--log-format=%s" $v.log.format) }}{{ end }}
{{- if $v.server.host }}
{{- $args = concat $args (list
    (printf "--sync-forever=%t" $v.sync.forever)
    (printf "--ca-cert=%s/ca.crt" $folder)
    (printf "--proxy-server-host=%s" $v.server.host)
    (printf "--proxy-server-port=%d" (int $v.server.port))) }}
{{- end }}
{{- with $v.bind.admin }}{{ $args = append $args (printf "--admin-bind-address=%s" .) }}{{ end }}
{{- with $v.bind.health }}{{ $args = append $args (printf "--health-server-host=%s" .) }}{{ end }}
{{- $args = concat $args (list
    (printf "--admin-server-port=%d" (int $v.ports.admin))
    (printf "--health-server-port=%d" (int $v.ports.health))) }}
{{- if $v.server.host }}
{{- if eq $v.auth "token" }}
{{- $args = append $args (printf "--service-account-token-path=%s/%s" $folder $v.token.file) }}
{{- else }}
{{- $args = concat $args (list (printf "--agent-cert=%s/tls.crt" $folder) (printf "--agent-key=%s/tls.key" $folder)) }}
{{- end }}
{{- $args = append $args (printf "--keepalive-time=%s" $v.keepaliveTime) }}
{{- if or (not $v.compat) (semverCompare ">=2.30" (printf "%s.0" $v.compat)) }}
{{- $args = append $args (printf "--xfr-channel-size=%d" (int $v.xfrChannelSize)) }}
{{- end }}
{{- with $v.identifiers }}{{ $args = append $args (printf "--agent-identifiers=%s" .) }}{{ end }}
{{- with $v.sync.interval }}{{ $args = append $args (printf "--sync-interval=%s" .) }}{{ end }}
{{- with $v.sync.intervalCap }}{{ $args = append $args (printf "--sync-interval-cap=%s" .) }}{{ end }}
{{- with $v.alpn }}{{ $args = append $args (printf "--alpn-proto=%s" (join "," .)) }}{{ end }}
{{- if $v.leases.enabled }}
{{- $args = concat $args (list "--count-server-leases=true"
    (printf "--lease-namespace=%s" $v.leases.namespace)
    (printf "--%s=%s" (empty $v.compat | ternary "lease-label-selector" "lease-label") $v.leases.labelSelector)) }}
{{- if ne $v.leases.countSource "default" }}{{ $args = append $args (printf "--server-count-source=%s" $v.leases.countSource) }}{{ end }}
{{- end }}
{{- end }}
{{- if not $v.compat }}
{{- $args = append $args (printf "--drain-timeout=%ds" (sub (int $v.terminationGracePeriodSeconds) 5)) }}
{{- with $v.destinations.allow }}{{ $args = append $args (printf "--allow-destinations=%s" (join "," .)) }}{{ end }}
{{- with $v.destinations.deny }}{{ $args = append $args (printf "--deny-destinations=%s" (join "," .)) }}{{ end }}
{{- if $v.openvpn.configMap }}{{ $args = append $args "--openvpn-config=/etc/openvpn/config/config" }}{{ end }}
{{- if $v.openvpn.remotes }}
{{- range $v.openvpn.remotes }}{{ $args = append $args (printf "--openvpn-remote=%s" .) }}{{ end }}
{{- $args = concat $args (list
    "--openvpn-ca=/etc/openvpn/certs/ca.crt"
    "--openvpn-cert=/etc/openvpn/certs/client.crt"
    "--openvpn-key=/etc/openvpn/certs/client.key") }}
{{- end }}
{{- if $openvpn }}
{{- with $v.openvpn.nodes }}{{ $args = append $args (printf "--openvpn-nodes=%s" (join "," .)) }}{{ end }}
{{- $args = append $args (printf "--openvpn-node-access-network=%s" $v.openvpn.nodeAccessNetwork) }}
{{- end }}
{{- end }}
{{- toYaml (concat $args $v.extraArgs) }}
{{- end }}

{{- define "culvert-agent.env" -}}
{{- $v := .Values -}}
{{- with $v.agentIdFrom }}
- name: PROXY_AGENT_ID
  valueFrom:
    fieldRef:
      fieldPath: {{ eq . "node" | ternary "spec.nodeName" "metadata.name" }}
{{- end }}
{{- if contains "$(HOST_IP)" $v.identifiers }}
- name: HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- end }}
{{- if contains "$(NODE_NAME)" $v.identifiers }}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}
{{- with $v.proxy.url }}
- name: HTTPS_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with $v.proxy.except }}
- name: NO_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "culvert-agent.volumes" -}}
{{- $v := .Values -}}
{{- if $v.server.host }}
- name: credentials
  projected:
    defaultMode: 0440
    sources:
      {{- if $v.ca.secret }}
      - secret:
          name: {{ $v.ca.secret | toYaml }}
          items: [{key: {{ $v.ca.key }}, path: ca.crt}]
      {{- else }}
      - configMap:
          name: {{ $v.ca.configMap | toYaml }}
          items: [{key: {{ $v.ca.key }}, path: ca.crt}]
      {{- end }}
      {{- if eq $v.auth "token" }}
      - serviceAccountToken:
          audience: {{ $v.token.audience | quote }}
          expirationSeconds: {{ $v.token.expirationSeconds }}
          path: {{ $v.token.file }}
      {{- else }}
      - secret:
          name: {{ $v.mtls.secret | toYaml }}
          items: [{key: {{ $v.mtls.certKey }}, path: tls.crt}, {key: {{ $v.mtls.keyKey }}, path: tls.key}]
      {{- end }}
{{- end }}
{{- if or $v.openvpn.remotes $v.openvpn.configMap }}
- name: openvpn-certificates
  secret:
    secretName: {{ $v.openvpn.secret | toYaml }}
    defaultMode: 0440
{{- end }}
{{- with $v.openvpn.configMap }}
- name: openvpn-config
  configMap:
    name: {{ . | toYaml }}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "culvert-agent.volumeMounts" -}}
{{- $v := .Values -}}
{{- if $v.server.host }}
- name: credentials
  mountPath: {{ include "culvert-agent.credentials" . }}
  readOnly: true
{{- end }}
{{- if or $v.openvpn.remotes $v.openvpn.configMap }}
- name: openvpn-certificates
  mountPath: /etc/openvpn/certs
  readOnly: true
{{- end }}
{{- if $v.openvpn.configMap }}
- name: openvpn-config
  mountPath: /etc/openvpn/config
  readOnly: true
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "culvert-agent.rollingUpdate" -}}
{{- $given := .Values.updateStrategy -}}
{{- if eq .Values.kind "Deployment" -}}
maxUnavailable: {{ include "culvert.or" (list $given.maxUnavailable (gt (int .Values.replicas) 1 | ternary 1 0)) }}
maxSurge: {{ include "culvert.or" (list $given.maxSurge "25%") }}
{{- else -}}
maxUnavailable: {{ include "culvert.or" (list $given.maxUnavailable (empty $given.maxSurge | ternary "10%" 0)) }}
maxSurge: {{ include "culvert.or" (list $given.maxSurge 0) }}
{{- end }}
{{- end }}

{{- define "culvert-agent.errors" -}}
{{- $v := .Values -}}
{{- $update := fromYaml (include "culvert-agent.rollingUpdate" .) -}}
{{- include "culvert.updateErrors" $update }}
{{- $none := list "0" "0%" }}
{{- if and (eq $v.kind "DaemonSet") (not (has (toString $update.maxUnavailable) $none)) (not (has (toString $update.maxSurge) $none)) }}
- updateStrategy.maxUnavailable and updateStrategy.maxSurge are both above 0: Kubernetes refuses a DaemonSet with both; leave one of them empty
{{- end }}
{{- include "culvert.scrapeErrors" . }}
{{- include "culvert.loopbackErrors" (dict "root" . "name" "bind.health" "address" $v.bind.health) }}
{{- $openvpn := or $v.openvpn.remotes $v.openvpn.configMap -}}
{{- if not (or $v.server.host $openvpn) }}
- server.host is empty: set the name of the servers, or openvpn.remotes for an agent that is only an OpenVPN client
{{- end }}
{{- if $v.server.host }}
{{- $start := toDate "2006-01-02" "2026-01-01" }}
{{- $interval := $v.sync.interval | default "1s" }}
{{- $cap := $v.sync.intervalCap | default "10s" }}
{{- if (dateModify $interval $start).After (dateModify $cap $start) }}
- sync.interval is {{ $interval }} and sync.intervalCap {{ $cap }}: the agent does not start with a cap below the interval; set sync.intervalCap to at least {{ $interval }}
{{- end }}
{{- if not (regexMatch "^((ipv4|ipv6|host|cidr|default-route)(=[^&;]*)?)?(&((ipv4|ipv6|host|cidr|default-route)(=[^&;]*)?)?)*$" $v.identifiers) }}
- identifiers is {{ $v.identifiers }}: the agent does not start with an identifier that has no key, or an unknown one; the keys are ipv4, ipv6, host, cidr and default-route, as in host=$(NODE_NAME)&ipv4=$(HOST_IP)
{{- end }}
{{- end }}
{{- if and $v.openvpn.remotes $v.openvpn.configMap }}
- openvpn.remotes and openvpn.configMap are both set: a file names its own servers
{{- end }}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" }}
{{- if and $openvpn (not (regexMatch (printf "^%s(\\.%s){3}/(1[0-6]|[0-9])$" $octet $octet) $v.openvpn.nodeAccessNetwork)) }}
- openvpn.nodeAccessNetwork is {{ $v.openvpn.nodeAccessNetwork | quote }}: the agent starts only with an IPv4 network of /16 or larger; write one such as 10.254.0.0/16
{{- end }}
{{- if and $v.server.host (eq $v.auth "mtls") (not $v.mtls.secret) }}
- auth is mtls and mtls.secret is empty: set the Secret with the client certificate
{{- end }}
{{- if and $v.mtls.secret (eq $v.auth "token") }}
- mtls.secret is set and auth is token: set auth to mtls
{{- end }}
{{- if and $v.compat (or $openvpn $v.destinations.allow $v.destinations.deny) }}
- compat is set with openvpn or destinations: the stock agent does not know these flags
{{- end }}
{{- if and $v.compat (ne (base $v.image.repository) "proxy-agent") (lt (int $v.terminationGracePeriodSeconds) 30) }}
- terminationGracePeriodSeconds is {{ $v.terminationGracePeriodSeconds }} with compat: Culvert's agent then drains for 25 s, and would be killed before its end; set at least 30, or remove compat
{{- end }}
{{- if and $v.leases.enabled (has $v.compat (list "2.28" "2.29")) }}
- leases.enabled with compat {{ $v.compat }}: the stock agents of this version do not know --lease-namespace and --lease-label; disable leases, or remove compat
{{- end }}
{{- if and $v.leases.enabled (not $v.server.host) }}
- leases.enabled needs server.host: an OpenVPN client counts no servers
{{- end }}
{{- if and $v.proxy.url $v.leases.enabled (not $v.proxy.except) }}
- proxy.url and leases.enabled are set without proxy.except: the agent would reach the Kubernetes API through the proxy; list the addresses of the API
{{- end }}
{{- if and (eq $v.kind "DaemonSet") $v.updateStrategy.maxSurge $v.hostNetwork }}
- updateStrategy.maxSurge needs two pods on a node, and hostNetwork lets only one listen on its ports
{{- end }}
{{- if and (eq $v.kind "Deployment") $v.pdb.enabled (gt (int $v.replicas) 1) (ge (int $v.pdb.minAvailable) (int $v.replicas)) }}
- pdb.minAvailable ({{ $v.pdb.minAvailable }}) is not below replicas ({{ $v.replicas }}): no node could be drained
{{- end }}
{{- if and (include "culvert.isLoopback" $v.bind.health) (not $v.hostNetwork) }}
- bind.health is {{ $v.bind.health }} without hostNetwork: the kubelet would probe its own node; leave it empty
{{- end }}
{{- if eq (int $v.ports.admin) (int $v.ports.health) }}
- ports.admin and ports.health must differ
{{- end }}
{{- if and $v.hostNetwork $v.networkPolicy.enabled }}
- networkPolicy.enabled has no effect on pods with hostNetwork: set it to false
{{- end }}
{{- if and (eq $v.agentIdFrom "node") (eq $v.kind "Deployment") (ne $v.spread.host "required") (gt (int $v.replicas) 1) }}
- agentIdFrom is node and two replicas may share a node: their dials would go to one of them; set spread.host to required or agentIdFrom to pod
{{- end }}
{{- end }}
