{{/* KKP's dashboards select the pods by this name. */}}
{{- define "culvert-node-tunnel.name" -}}envoy-agent{{- end }}

{{/* Program of the chart in the image `culvert`. */}}
{{- define "culvert-node-tunnel.program" -}}culvert-node-tunnel{{- end }}

{{/* Labels of the workload and of its pods, beside the labels of all objects. */}}
{{- define "culvert-node-tunnel.appLabels" -}}
app: envoy-agent
{{- end }}

{{/* Ports below 1024 need a capability. */}}
{{- define "culvert-node-tunnel.capabilities" -}}
{{- $add := list -}}
{{- if .Values.interface.create }}{{ $add = append $add "NET_ADMIN" }}{{ end }}
{{- range append .Values.listeners .Values.stats }}{{ if lt (int .port) 1024 }}{{ $add = append $add "NET_BIND_SERVICE" }}{{ end }}{{ end }}
{{- toYaml (uniq $add) }}
{{- end }}

{{/* The capabilities that the program needs, and those of the values. Added capabilities have no effect for other users than
root. */}}
{{- define "culvert-node-tunnel.securityContext" -}}
{{- $context := deepCopy .Values.securityContext -}}
{{- with fromYamlArray (include "culvert-node-tunnel.capabilities" .) }}
{{- $capabilities := $context.capabilities | default dict }}
{{- $capabilities = set $capabilities "add" (concat . ($capabilities.add | default list) | uniq) }}
{{- $context = merge (dict "runAsUser" 0 "runAsGroup" 0 "capabilities" $capabilities) $context }}
{{- else }}
{{- $context = merge $context (dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532) }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* A host for the front of `HOST:PORT`: IPv6 addresses in brackets. */}}
{{- define "culvert-node-tunnel.host" -}}
{{ and (contains ":" .) (not (hasPrefix "[" .)) | ternary (printf "[%s]" .) . }}
{{- end }}

{{- define "culvert-node-tunnel.args" -}}
{{- $v := .Values -}}
{{- $args := list
    (printf "-v=%d" (int $v.log.verbosity))
    (printf "--log-format=%s" $v.log.format)
    (printf "--proxy=%s:%d" (include "culvert-node-tunnel.host" $v.door.host) (int $v.door.port)) -}}
{{- range $listener := $v.listeners }}
{{- range $address := $v.addresses }}
{{- $args = append $args (printf "--listen=%s:%d=%s" (include "culvert-node-tunnel.host" $address) (int $listener.port) $listener.authority) }}
{{- end }}
{{- end }}
{{- if $v.tls.caSecret }}
{{- $args = append $args "--proxy-ca=/etc/culvert/door/ca.crt" }}
{{- with $v.tls.serverName }}{{ $args = append $args (printf "--proxy-server-name=%s" .) }}{{ end }}
{{- end }}
{{- if $v.tls.clientSecret }}
{{- $args = concat $args (list "--proxy-cert=/etc/culvert/door/tls.crt" "--proxy-key=/etc/culvert/door/tls.key") }}
{{- end }}
{{- if $v.interface.create }}
{{- $args = concat $args (list (printf "--if=%s" $v.interface.name) (printf "--addr=%s" (join "," $v.addresses))) }}
{{- end }}
{{- $args = concat $args (list
    (printf "--connections=%d" (int $v.connections))
    (printf "--stats-port=%d" (int $v.stats.port))
    (printf "--drain-timeout=%ds" (sub (int $v.terminationGracePeriodSeconds) 5))) }}
{{- with $v.stats.address }}{{ $args = append $args (printf "--stats-address=%s" .) }}{{ end }}
{{- toYaml (concat $args $v.extraArgs) }}
{{- end }}

{{- define "culvert-node-tunnel.errors" -}}
{{- $v := .Values -}}
{{- include "culvert.loopbackErrors" (dict "root" . "name" "stats.address" "address" $v.stats.address) }}
{{- if not $v.door.host }}
- door.host is empty: set the name of the seed's front door
{{- end }}
{{- if not $v.listeners }}
- listeners is empty: set port and authority, for example 6443 and apiserver-external.cluster-abc123.svc.cluster.local:443
{{- end }}
{{- if not $v.addresses }}
- addresses is empty: set the address of the node tunnel
{{- end }}
{{- if and $v.tls.clientSecret (not $v.tls.caSecret) }}
- tls.clientSecret needs tls.caSecret: without it the door is reached in plain text
{{- end }}
{{- if and $v.tls.serverName (not $v.tls.caSecret) }}
- tls.serverName needs tls.caSecret: without it the door is reached in plain text
{{- end }}
{{- $ports := list }}
{{- range $v.listeners }}
{{- if has (int .port) $ports }}
- two listeners have the port {{ .port }}: each listener uses all addresses; give each a port of its own
{{- end }}
{{- $ports = append $ports (int .port) }}
{{- if eq (int .port) (int $v.stats.port) }}
- listener {{ .authority }} and stats.port have the same port {{ .port }}
{{- end }}
{{- end }}
{{- end }}
