{{/* KKP's dashboards select the pods by this name. */}}
{{- define "culvert-door.name" -}}nodeport-proxy-envoy{{- end }}

{{/* Program of the chart in the image `culvert`. */}}
{{- define "culvert-door.program" -}}culvert-nodeport-proxy{{- end }}

{{/* Labels of the workload and of its pods, beside the labels of all objects. */}}
{{- define "culvert-door.appLabels" -}}
app: nodeport-proxy-envoy
{{- end }}

{{/* Name of the updater's own pod. */}}
{{- define "culvert-door.updater" -}}
{{ eq .Values.scope "seed" | ternary "nodeport-proxy-updater" "nodeport-proxy-lb-updater" }}
{{- end }}

{{- define "culvert-door.service" -}}
{{ .Values.service.name | default (eq .Values.scope "seed" | ternary "nodeport-proxy" "front-loadbalancer") }}
{{- end }}

{{- define "culvert-door.namespace" -}}
{{ .Values.namespace | default (eq .Values.scope "seed" | ternary "" .Release.Namespace) }}
{{- end }}

{{- define "culvert-door.annotationKey" -}}
{{ .Values.annotationKey | default (eq .Values.scope "seed" | ternary "nodeport-proxy.k8s.io/expose" "nodeport-proxy.k8s.io/expose-namespaced") }}
{{- end }}

{{/* Arguments that the door and the updater share. */}}
{{- define "culvert-door.sharedArgs" -}}
{{- $v := .Values -}}
{{- $args := list (printf "-v=%d" (int $v.log.verbosity)) (printf "--log-format=%s" $v.log.format) (printf "--expose-annotation-key=%s" (include "culvert-door.annotationKey" .)) -}}
{{- with include "culvert-door.namespace" . }}{{ $args = append $args (printf "--namespace=%s" .) }}{{ end }}
{{- if eq $v.scope "seed" }}
{{- $args = concat $args (list (printf "--envoy-sni-port=%d" (int $v.ports.sni)) (printf "--envoy-tunneling-port=%d" (int $v.ports.tunneling))) }}
{{- with $v.ports.quic }}{{ $args = append $args (printf "--sni-quic-port=%d" (int .)) }}{{ end }}
{{- end }}
{{- toYaml (concat $args (list (printf "--envoy-stats-port=%d" (int $v.ports.stats)) (printf "--bind-address=%s" $v.bindAddress))) }}
{{- end }}

{{/* Arguments of the program that maintains the Service's ports. */}}
{{- define "culvert-door.balancerArgs" -}}
- --lb-namespace={{ .Release.Namespace }}
- --lb-name={{ include "culvert-door.service" . }}
{{- if eq .Values.scope "cluster" }}
- --namespaced=true
{{- end }}
{{- end }}

{{- define "culvert-door.args" -}}
{{- $v := .Values -}}
{{- $args := fromYamlArray (include "culvert-door.sharedArgs" .) -}}
{{- with $v.ports.admin }}{{ $args = append $args (printf "--envoy-admin-port=%d" (int .)) }}{{ end }}
{{- if $v.tls.secret }}
{{- $args = concat $args (list "--tunneling-cert=/etc/culvert/tls/tls.crt" "--tunneling-key=/etc/culvert/tls/tls.key") }}
{{- end }}
{{- if $v.tls.clientCASecret }}{{ $args = append $args "--tunneling-client-ca=/etc/culvert/tls/ca.crt" }}{{ end }}
{{- if $v.tls.required }}{{ $args = append $args "--tunneling-require-tls=true" }}{{ end }}
{{- with $v.allowedNetworks }}{{ $args = append $args (printf "--tunneling-allowed-networks=%s" (join "," .)) }}{{ end }}
{{- with $v.proxyProtocolFrom }}{{ $args = append $args (printf "--proxy-protocol-from=%s" (join "," .)) }}{{ end }}
{{- with $v.connectionSettings }}
{{- $args = concat $args (list
    (printf "--sni-listener-idle-timeout=%s" .sniListenerIdleTimeout)
    (printf "--tunneling-connection-idle-timeout=%s" .tunnelingConnectionIdleTimeout)
    (printf "--tunneling-stream-idle-timeout=%s" .tunnelingStreamIdleTimeout)
    (printf "--downstream-tcp-keepalive-time=%s" .downstreamTCPKeepaliveTime)
    (printf "--downstream-tcp-keepalive-interval=%s" .downstreamTCPKeepaliveInterval)
    (printf "--downstream-tcp-keepalive-probes=%d" (int .downstreamTCPKeepaliveProbes))
    (printf "--upstream-tcp-keepalive-time=%s" .upstreamTCPKeepaliveTime)
    (printf "--upstream-tcp-keepalive-interval=%s" .upstreamTCPKeepaliveInterval)
    (printf "--upstream-tcp-keepalive-probes=%d" (int .upstreamTCPKeepaliveProbes))) }}
{{- end }}
{{- $args = concat $args (list
    (printf "--max-connections=%d" (int $v.maxConnections))
    (printf "--drain-timeout=%ds" (sub (int $v.terminationGracePeriodSeconds) 5))) }}
{{- if eq $v.updater "replica" }}
{{- $args = concat $args (list "--update-loadbalancer=true") (fromYamlArray (include "culvert-door.balancerArgs" .)) }}
{{- end }}
{{- toYaml (concat $args $v.extraArgs) }}
{{- end }}

{{- define "culvert-door.rollingUpdate" -}}
maxUnavailable: {{ include "culvert.or" (list .Values.updateStrategy.maxUnavailable "25%") }}
maxSurge: {{ include "culvert.or" (list .Values.updateStrategy.maxSurge "25%") }}
{{- end }}

{{- define "culvert-door.errors" -}}
{{- $v := .Values -}}
{{- include "culvert.updateErrors" (fromYaml (include "culvert-door.rollingUpdate" .)) }}
{{- if $v.service.create }}
{{- include "culvert.serviceErrors" (dict "root" . "services" (list (list "service.name" (include "culvert-door.service" .)))) }}
{{- end }}
{{- if and (eq $v.updater "deployment") (eq (include "culvert.fullname" .) (include "culvert-door.updater" .)) }}
- the objects have the name {{ include "culvert-door.updater" . }}, which is also the Deployment of the updater, so only one of the two Deployments would exist; set fullnameOverride to another name
{{- end }}
{{- if and $v.pdb.enabled (has (toString $v.pdb.maxUnavailable) (list "0" "0%")) }}
- pdb.maxUnavailable is {{ $v.pdb.maxUnavailable }}: no node could be drained; set at least 1, or set pdb.enabled to false
{{- end }}
{{- if and (or $v.tls.required $v.tls.clientCASecret) (not $v.tls.secret) }}
- tls.required and tls.clientCASecret need tls.secret: without a certificate there is no TLS
{{- end }}
{{- if and (eq $v.scope "cluster") (or $v.tls.secret $v.allowedNetworks) }}
- scope is cluster with tls or allowedNetworks: the door of a cluster has no CONNECT port
{{- end }}
{{- if and (eq $v.scope "seed") (not $v.ports.tunneling) (or $v.tls.secret $v.allowedNetworks) }}
- ports.tunneling is 0 with tls or allowedNetworks: there is no CONNECT port
{{- end }}
{{- if and (eq $v.updater "none") (eq $v.service.type "LoadBalancer") $v.service.create }}
- updater is none and the Service is a LoadBalancer: no program would add its ports
{{- end }}
{{- if and $v.ports.quic (not $v.ports.sni) }}
- ports.quic is set and ports.sni is 0: agents connect over TCP before QUIC
{{- end }}
{{- if and $v.service.quic (or (not $v.ports.quic) (ne $v.scope "seed") (eq $v.updater "none") (not $v.service.create)) }}
- service.quic needs ports.quic, scope seed, service.create and an updater, which adds the port
{{- end }}
{{- if and $v.namespace (ne $v.namespace .Release.Namespace) (or (eq $v.scope "cluster") (ne $v.updater "none")) }}
- namespace is not the namespace of the release, with scope cluster or an updater: the updater works only in the namespace of the release; leave namespace empty, or set scope to seed and updater to none
{{- end }}
{{- if and $v.service.create (ne $v.service.type "LoadBalancer") (or $v.service.loadBalancerSourceRanges $v.service.loadBalancerClass) }}
- service.loadBalancerSourceRanges or service.loadBalancerClass with service.type {{ $v.service.type }}: Kubernetes refuses the Service; set service.type to LoadBalancer
{{- end }}
{{- if and $v.service.create (eq $v.service.type "ClusterIP") $v.service.externalTrafficPolicy }}
- service.externalTrafficPolicy with service.type ClusterIP: Kubernetes refuses the Service; leave service.externalTrafficPolicy empty
{{- end }}
{{- if and $v.service.create (or (has "IPv6" $v.service.ipFamilies) (hasSuffix "DualStack" $v.service.ipFamilyPolicy)) (eq $v.bindAddress "0.0.0.0") }}
- service.ipFamilies or service.ipFamilyPolicy may add IPv6 and bindAddress is 0.0.0.0: the door would refuse connections to the IPv6 address; set bindAddress to ""
{{- end }}
{{- if include "culvert.isLoopback" $v.bindAddress }}
- bindAddress is {{ $v.bindAddress }}: neither clients nor the kubelet reach the listeners; leave bindAddress at its default, or set it to "::" for IPv4 and IPv6
{{- end }}
{{- $ports := list (int $v.ports.stats) }}
{{- range $port := list $v.ports.admin (eq $v.scope "seed" | ternary $v.ports.sni 0) (eq $v.scope "seed" | ternary $v.ports.tunneling 0) }}
{{- if $port }}{{ $ports = append $ports (int $port) }}{{ end }}
{{- end }}
{{- if ne (len $ports) (len (uniq $ports)) }}
- ports.sni, ports.tunneling, ports.stats and ports.admin must differ
{{- end }}
{{- end }}
