{{- define "culvert-server.name" -}}culvert-server{{- end }}

{{/* Program of the chart in the image `culvert`. */}}
{{- define "culvert-server.program" -}}culvert-server{{- end }}

{{/* Labels of the workload and of its pods, beside the labels of all objects. */}}
{{- define "culvert-server.appLabels" -}}
app: konnectivity-server
k8s-app: konnectivity-server
{{- end }}

{{- define "culvert-server.service" -}}
{{ .Values.service.name | default (include "culvert.fullname" .) }}
{{- end }}

{{- define "culvert-server.frontEnd" -}}
{{ .Values.frontEnd.serviceName | default (printf "%s-front-end" (include "culvert.fullname" .)) }}
{{- end }}

{{/* "true" if the servers use the account of their pod. */}}
{{- define "culvert-server.ownAccount" -}}
{{- $v := .Values -}}
{{- if and (not $v.kubeconfig.secret) (or (eq $v.agents.auth "token") $v.leases.enabled) -}}true{{- end -}}
{{- end }}

{{/* The stock server of KKP's version knows every argument that `compat` leaves in place. */}}
{{- define "culvert-server.args" -}}
{{- $v := .Values -}}
{{- $tuned := or (not $v.compat) (semverCompare ">=2.30" (printf "%s.0" $v.compat)) -}}
{{- $args := list
    "--logtostderr=true"
    (printf "-v=%d" (int $v.log.verbosity))
    "--cluster-key=/etc/culvert/agents/tls.key"
    "--cluster-cert=/etc/culvert/agents/tls.crt" -}}
{{- with $v.kubeconfig.secret }}{{ $args = append $args "--kubeconfig=/etc/culvert/kubeconfig/kubeconfig" }}{{ end }}
{{- $args = concat $args (list
    (printf "--server-count=%d" (int $v.replicas))
    (printf "--mode=%s" $v.frontEnd.mode)
    (printf "--server-port=%d" (int $v.frontEnd.port))
    "--server-cert=/etc/culvert/front-end/tls.crt"
    "--server-key=/etc/culvert/front-end/tls.key"
    "--server-ca-cert=/etc/culvert/front-end/ca.crt"
    (printf "--agent-port=%d" (int $v.agents.port))
    (printf "--admin-port=%d" (int $v.ports.admin))) }}
{{- $bind := or (and $tuned (not (empty $v.compat))) (not (empty $v.admin.tlsSecret)) | ternary "0.0.0.0" "" }}
{{- with $v.bind.admin | default $bind }}{{ $args = append $args (printf "--admin-bind-address=%s" .) }}{{ end }}
{{- $args = append $args (printf "--health-port=%d" (int $v.ports.health)) }}
{{- if eq $v.agents.auth "token" }}
{{- $args = concat $args (list
    (printf "--agent-namespace=%s" $v.agents.namespace)
    (printf "--agent-service-account=%s" $v.agents.serviceAccount)
    (printf "--authentication-audience=%s" $v.agents.audience)) }}
{{- else }}
{{- $args = append $args "--cluster-ca-cert=/etc/culvert/agents/ca.crt" }}
{{- end }}
{{- $args = concat $args (list
    (printf "--proxy-strategies=%s" (join "," $v.strategies))
    (printf "--keepalive-time=%s" $v.keepaliveTime)) }}
{{- if $tuned }}{{ $args = append $args (printf "--xfr-channel-size=%d" (int $v.xfrChannelSize)) }}{{ end }}
{{- if $v.leases.enabled }}
{{- $args = concat $args (list "--enable-lease-controller=true"
    (printf "--lease-namespace=%s" $v.leases.namespace)
    (printf "--lease-label=%s" $v.leases.label)) }}
{{- end }}
{{- if not $v.compat }}{{ $args = concat $args (fromYamlArray (include "culvert-server.ownArgs" .)) }}{{ end }}
{{- toYaml (concat $args $v.extraArgs) }}
{{- end }}

{{/* Type of the update strategy. Two OpenVPN servers at once would share the clients. */}}
{{- define "culvert-server.updateType" -}}
{{- $recreate := and .Values.openvpn.enabled (eq (int .Values.replicas) 1) -}}
{{- .Values.updateStrategy.type | default (ternary "Recreate" "RollingUpdate" $recreate) -}}
{{- end }}

{{/* Arguments that the stock server does not know. With Recreate, the next pod starts after the end of this one, so a drain
would only lengthen the outage. */}}
{{- define "culvert-server.ownArgs" -}}
{{- $v := .Values -}}
{{- $args := list
    (printf "--log-format=%s" $v.log.format)
    (printf "--graceful-shutdown-timeout=%ds" (ternary 0 (sub (int $v.terminationGracePeriodSeconds) 5)
        (eq (include "culvert-server.updateType" .) "Recreate"))) -}}
{{- if $v.agents.quic }}{{ $args = append $args (printf "--agent-quic-port=%d" (int $v.agents.port)) }}{{ end }}
{{- with $v.agents.idFrom }}{{ $args = append $args (printf "--agent-id-from=%s" .) }}{{ end }}
{{- with $v.agents.proxyProtocolFrom }}{{ $args = append $args (printf "--agent-proxy-protocol-from=%s" (join "," .)) }}{{ end }}
{{- with $v.destinations.allow }}{{ $args = append $args (printf "--allow-destinations=%s" (join "," .)) }}{{ end }}
{{- with $v.destinations.deny }}{{ $args = append $args (printf "--deny-destinations=%s" (join "," .)) }}{{ end }}
{{- if $v.admin.socket }}{{ $args = append $args "--admin-uds=/run/culvert/admin.sock" }}{{ end }}
{{- if $v.admin.tlsSecret }}
{{- $args = concat $args (list
    "--admin-cert=/etc/culvert/admin/tls.crt"
    "--admin-key=/etc/culvert/admin/tls.key"
    "--admin-ca-cert=/etc/culvert/admin/ca.crt") }}
{{- end }}
{{- with $v.openvpn }}
{{- if .enabled }}
{{- $listen := list }}
{{- range .protocols }}{{ $listen = append $listen (printf "%s::%d" . (int $v.openvpn.port)) }}{{ end }}
{{- $args = concat $args (list
    "--tunnel-mode-file=/etc/culvert/mode/tunnelMode"
    "--tunnel-state-file=/run/culvert/tunnel-state"
    (printf "--tunnel-drain=%s" $v.tunnel.drain)
    (printf "--openvpn-listen=%s" (join "," $listen))
    "--openvpn-ca=/etc/openvpn/pki/ca/ca.crt"
    "--openvpn-cert=/etc/openvpn/pki/server/server.crt"
    "--openvpn-key=/etc/openvpn/pki/server/server.key"
    (printf "--openvpn-network=%s" .network)
    (printf "--openvpn-route=%s" (join "," .routes))
    (printf "--openvpn-push-route=%s" (join "," (.pushRoutes | default .routes)))
    (printf "--openvpn-node-access-network=%s" .nodeAccessNetwork)
    (printf "--openvpn-duplicate-cn=%t" .duplicateCN)
    (printf "--openvpn-watch-nodes=%t" .watchNodes)
    "--openvpn-client-config-dir=/etc/openvpn/clients") }}
{{- with .proxyProtocolFrom }}{{ $args = append $args (printf "--openvpn-proxy-protocol-from=%s" (join "," .)) }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml $args }}
{{- end }}

{{- define "culvert-server.env" -}}
{{- if .Values.serverIdFrom }}
- name: PROXY_SERVER_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Volumes and their folders: name, folder, source. */}}
{{- define "culvert-server.files" -}}
{{- $v := .Values -}}
- name: front-end
  folder: /etc/culvert/front-end
  source:
    secret:
      secretName: {{ $v.frontEnd.secret | toYaml }}
      defaultMode: 0440
      items:
        - {key: {{ $v.frontEnd.certKey }}, path: tls.crt}
        - {key: {{ $v.frontEnd.keyKey }}, path: tls.key}
        - {key: {{ $v.frontEnd.caKey }}, path: ca.crt}
- name: agents
  folder: /etc/culvert/agents
  source:
    projected:
      defaultMode: 0440
      sources:
        - secret:
            name: {{ $v.agents.secret | toYaml }}
            items:
              - {key: {{ $v.agents.certKey }}, path: tls.crt}
              - {key: {{ $v.agents.keyKey }}, path: tls.key}
        {{- if eq $v.agents.auth "mtls" }}
        - secret:
            name: {{ $v.agents.caSecret | toYaml }}
            items: [{key: {{ $v.agents.caKey }}, path: ca.crt}]
        {{- end }}
{{- with $v.kubeconfig.secret }}
- name: kubeconfig
  folder: /etc/culvert/kubeconfig
  source:
    secret:
      secretName: {{ . | toYaml }}
      defaultMode: 0440
      items: [{key: {{ $v.kubeconfig.key }}, path: kubeconfig}]
{{- end }}
{{- with $v.admin.tlsSecret }}
- name: admin
  folder: /etc/culvert/admin
  source:
    secret: {secretName: {{ . | toYaml }}, defaultMode: 0440}
{{- end }}
{{- if and (not $v.compat) (or $v.admin.socket $v.openvpn.enabled) }}
- name: run
  folder: /run/culvert
  source:
    {{- if and $v.openvpn.enabled $v.tunnel.stateClaim }}
    persistentVolumeClaim: {claimName: {{ $v.tunnel.stateClaim | toYaml }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
{{- end }}
{{- if $v.openvpn.enabled }}
- name: tunnel-mode
  folder: /etc/culvert/mode
  source:
    configMap: {name: {{ include "culvert.fullname" . }}-tunnel-mode}
- name: openvpn-ca
  folder: /etc/openvpn/pki/ca
  source:
    secret: {secretName: {{ $v.openvpn.caSecret | toYaml }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
- name: openvpn-server
  folder: /etc/openvpn/pki/server
  source:
    secret: {secretName: {{ $v.openvpn.serverSecret | toYaml }}, defaultMode: 0440}
- name: openvpn-clients
  folder: /etc/openvpn/clients
  source:
    configMap: {name: {{ $v.openvpn.clientConfigMap | default (printf "%s-openvpn-clients" (include "culvert.fullname" .)) | toYaml }}}
{{- end }}
{{- end }}

{{- define "culvert-server.rollingUpdate" -}}
maxUnavailable: {{ include "culvert.or" (list .Values.updateStrategy.maxUnavailable 0) }}
maxSurge: {{ include "culvert.or" (list .Values.updateStrategy.maxSurge 1) }}
{{- end }}

{{/* Error of a text that is not an IPv4 network, has bits after the prefix, or has a prefix above `longest`. `name` is the value
with the text `network`. */}}
{{- define "culvert-server.networkErrors" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- if not .network }}{{- /* The server's default. */}}
{{- else if not (regexMatch (printf "^%s(\\.%s){3}/(3[0-2]|[12]?[0-9])$" $octet $octet) .network) }}
- {{ .name }} has {{ .network }}, which is not an IPv4 network; write one such as 10.20.0.0/24
{{- else }}
{{- $parts := splitList "/" .network }}
{{- $prefix := last $parts | int }}
{{- $address := 0 }}
{{- range splitList "." (first $parts) }}{{ $address = add (mul $address 256) (int .) }}{{ end }}
{{- $size := 1 }}
{{- range until (sub 32 $prefix | int) }}{{ $size = mul $size 2 }}{{ end }}
{{- with mod $address $size }}
{{- $base := sub $address . }}
- {{ $.name }} has {{ $.network }}, an address within a network, and the server does not start with it; write {{ range $at, $divisor := list 16777216 65536 256 1 }}{{ if $at }}.{{ end }}{{ mod (div $base $divisor) 256 }}{{ end }}/{{ $prefix }}
{{- end }}
{{- if gt $prefix (int .longest) }}
- {{ .name }} has {{ .network }}, which is too small; the smallest network is a /{{ .longest }}
{{- end }}
{{- end }}
{{- end }}

{{- define "culvert-server.errors" -}}
{{- $v := .Values -}}
{{- include "culvert.updateErrors" (fromYaml (include "culvert-server.rollingUpdate" .)) }}
{{- include "culvert.scrapeErrors" . }}
{{- $services := list (list "service.name" (include "culvert-server.service" .)) (list "frontEnd.serviceName" (include "culvert-server.frontEnd" .)) }}
{{- if $v.openvpn.enabled }}{{ $services = append $services (list "service.openvpnName" $v.service.openvpnName) }}{{ end }}
{{- include "culvert.serviceErrors" (dict "root" . "services" $services) }}
{{- if and $v.pdb.enabled (gt (int $v.replicas) 1) (has (toString $v.pdb.maxUnavailable) (list "0" "0%")) }}
- pdb.maxUnavailable is {{ $v.pdb.maxUnavailable }}: no node could be drained; set at least 1, or set pdb.enabled to false
{{- end }}
{{- if and $v.compat (or $v.openvpn.enabled $v.destinations.allow $v.destinations.deny $v.agents.proxyProtocolFrom $v.agents.idFrom $v.agents.quic $v.admin.tlsSecret) }}
- compat is set with openvpn, destinations, admin.tlsSecret, agents.idFrom, agents.quic or agents.proxyProtocolFrom: the stock server does not know these flags
{{- end }}
{{- if and $v.leases.enabled (has $v.compat (list "2.28" "2.29")) }}
- leases.enabled with compat {{ $v.compat }}: the stock servers of this version do not know --lease-namespace and --lease-label; disable leases, or remove compat
{{- end }}
{{- if and $v.compat (has "cidr" $v.strategies) }}
- compat is set and strategies has cidr: the stock server does not know this strategy; remove cidr or compat
{{- end }}
{{- if and $v.agents.quic (has $v.expose.strategy (list "NodePort" "LoadBalancer")) }}
- agents.quic with expose.strategy {{ $v.expose.strategy }}: the front door forwards QUIC only by server name; use Tunneling
{{- end }}
{{- if and (eq $v.agents.auth "mtls") (not $v.agents.caSecret) }}
- agents.auth is mtls and agents.caSecret is empty: set the Secret with the CA of the agents
{{- end }}
{{- if and (eq $v.agents.idFrom "certificate") (ne $v.agents.auth "mtls") }}
- agents.idFrom is certificate: agents without mtls have no certificate
{{- end }}
{{- if and (eq $v.agents.idFrom "token") (ne $v.agents.auth "token") }}
- agents.idFrom is token: agents with mtls send no token
{{- end }}
{{- if and (ne $v.tunnel.mode "konnectivity") (not $v.openvpn.enabled) }}
- tunnel.mode is {{ $v.tunnel.mode }} and openvpn.enabled is false: the server has no such tunnel
{{- end }}
{{- if and (eq $v.tunnel.mode "openvpn") (gt (int $v.replicas) 1) }}
- tunnel.mode is openvpn with {{ $v.replicas }} replicas: a client connects to one server, and the others would have no client; set replicas to 1
{{- end }}
{{- if and $v.openvpn.enabled (not $v.openvpn.routes) }}
- openvpn.routes is empty: list the networks of pods, services and node access
{{- end }}
{{- if $v.openvpn.enabled }}
{{- include "culvert-server.networkErrors" (dict "name" "openvpn.network" "network" $v.openvpn.network "longest" 29) }}
{{- include "culvert-server.networkErrors" (dict "name" "openvpn.nodeAccessNetwork" "network" $v.openvpn.nodeAccessNetwork "longest" 16) }}
{{- range $name, $networks := dict "openvpn.routes" $v.openvpn.routes "openvpn.pushRoutes" $v.openvpn.pushRoutes }}
{{- range $networks }}
{{- include "culvert-server.networkErrors" (dict "name" $name "network" . "longest" 32) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $v.openvpn.enabled (not (or $v.openvpn.clientConfigs $v.openvpn.clientConfigMap)) }}
- openvpn.clientConfigs and openvpn.clientConfigMap are empty: no client would have a network behind it
{{- end }}
{{- if and $v.openvpn.watchNodes (not $v.kubeconfig.secret) }}
- openvpn.watchNodes needs kubeconfig.secret: the server reads Nodes only with a kubeconfig
{{- end }}
{{- if and $v.openvpn.clientConfigs $v.openvpn.clientConfigMap }}
- openvpn.clientConfigs and openvpn.clientConfigMap are both set: keep one
{{- end }}
{{- if and $v.tunnel.stateClaim (gt (int $v.replicas) 1) }}
- tunnel.stateClaim with {{ $v.replicas }} replicas: each server needs a state and a socket of its own
{{- else if and $v.tunnel.stateClaim $v.openvpn.enabled (eq (include "culvert-server.updateType" .) "RollingUpdate") }}
- tunnel.stateClaim with updateStrategy.type RollingUpdate: the next server may start before the end of this one, and both would use one state and one socket; set updateStrategy.type to Recreate, or leave it empty
{{- end }}
{{- if and $v.openvpn.enabled $v.expose.strategy (not (has "tcp" $v.openvpn.protocols)) }}
- openvpn.protocols is udp with expose.strategy {{ $v.expose.strategy }}: the front door forwards OpenVPN only over TCP, so clients outside of the seed would not reach the server; add tcp
{{- end }}
{{- if and (eq $v.expose.strategy "Tunneling") (not $v.expose.serverName) }}
- expose.strategy is Tunneling and expose.serverName is empty: agents reach the server by its TLS server name
{{- end }}
{{- if and $v.expose.serverName (ne $v.expose.strategy "Tunneling") }}
- expose.serverName is set and expose.strategy is not Tunneling: the other strategies use node ports
{{- end }}
{{- if and $v.service.nodePort (eq (include "culvert-server.serviceType" .) "ClusterIP") }}
- service.nodePort is set and the Service for agents has no node port: set service.type or expose.strategy
{{- end }}
{{- $type := include "culvert-server.serviceType" . }}
{{- $reason := $v.expose.strategy | empty | ternary (printf "service.type %s" $v.service.type) (printf "expose.strategy %s" $v.expose.strategy) }}
{{- if and (ne $type "LoadBalancer") (or $v.service.loadBalancerSourceRanges $v.service.loadBalancerClass) }}
- service.loadBalancerSourceRanges or service.loadBalancerClass with {{ $reason }}: Kubernetes refuses {{ $type }} Services with these fields; {{ empty $v.expose.strategy | ternary "set service.type to LoadBalancer" "leave both empty, and list the networks of agents in the annotation nodeport-proxy.k8s.io/allowed-networks in service.annotations" }}
{{- end }}
{{- if and (eq $type "ClusterIP") $v.service.externalTrafficPolicy }}
- service.externalTrafficPolicy with {{ $reason }}: Kubernetes refuses ClusterIP Services with this field; leave service.externalTrafficPolicy empty
{{- end }}
{{- if and $v.egressSelector.create (ne $v.frontEnd.mode "http-connect") }}
- egressSelector.create needs frontEnd.mode http-connect: kube-apiserver uses gRPC only over a Unix socket
{{- end }}
{{- if $v.networkPolicy.frontEndEgress }}
{{- range $v.networkPolicy.frontEndFrom }}
{{- if or (not .podSelector) .namespaceSelector }}
- networkPolicy.frontEndEgress needs a podSelector without a namespaceSelector in each peer of networkPolicy.frontEndFrom: a policy selects pods of its own namespace
{{- end }}
{{- end }}
{{- end }}
{{- $ports := list (int $v.frontEnd.port) (int $v.agents.port) (int $v.ports.admin) (int $v.ports.health) }}
{{- if and $v.openvpn.enabled (has "tcp" $v.openvpn.protocols) }}{{ $ports = append $ports (int $v.openvpn.port) }}{{ end }}
{{- if ne (len $ports) (len (uniq $ports)) }}
- frontEnd.port, agents.port, ports.admin, ports.health and the TCP port openvpn.port must differ
{{- end }}
{{- if and $v.openvpn.enabled (has "udp" $v.openvpn.protocols) $v.agents.quic (eq (int $v.openvpn.port) (int $v.agents.port)) }}
- openvpn.port is agents.port with agents.quic and OpenVPN over UDP: both need the UDP port {{ $v.openvpn.port }}; change one of them
{{- end }}
{{- end }}

{{- define "culvert-server.serviceType" -}}
{{- if .Values.expose.strategy -}}
{{ (fromYaml (include "culvert.expose" (dict "strategy" .Values.expose.strategy "nodePort" "" "name" ""))).type }}
{{- else -}}
{{ .Values.service.type }}
{{- end -}}
{{- end }}

{{/* Fields of the Services that agents and OpenVPN clients connect to from outside. */}}
{{- define "culvert-server.exposure" -}}
{{- with .Values.service }}
{{- with .loadBalancerSourceRanges }}
loadBalancerSourceRanges: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .loadBalancerClass }}
loadBalancerClass: {{ . | toYaml }}
{{- end }}
{{- with .externalTrafficPolicy }}
externalTrafficPolicy: {{ . }}
{{- end }}
{{- with .ipFamilies }}
ipFamilies: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- end }}
{{- end }}
