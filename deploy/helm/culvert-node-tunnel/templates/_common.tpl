{{/* Shared by all charts of Culvert. Every chart has the same copy of this file. */}}

{{- define "culvert.fullname" -}}
{{ .Values.fullnameOverride | default .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* A value, or the default for an empty text. 0 is a value. */}}
{{- define "culvert.or" -}}
{{ eq (toString (first .)) "" | ternary (last .) (first .) }}
{{- end }}

{{/* Labels that never change. Each chart defines "NAME-OF-CHART.name". */}}
{{- define "culvert.selector" -}}
app.kubernetes.io/name: {{ include (printf "%s.name" .Chart.Name) . }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}

{{/* Labels of pods. A new version of the chart alone does not change them, so that it replaces no pod. */}}
{{- define "culvert.podLabels" -}}
{{ include "culvert.selector" . }}
app.kubernetes.io/part-of: culvert
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | trunc 63 | trimAll "-_." | quote }}
{{- end }}

{{/* Labels of all objects. */}}
{{- define "culvert.labels" -}}
{{ include "culvert.podLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "culvert.image" -}}
{{- $image := .Values.image -}}
{{- $name := printf "%s/%s" $image.registry $image.repository -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default (printf "v%s" .Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/* Command of a container; empty: the entry point of the image. The image `culvert` has all programs, and its entry point is
the tool `culvert`. Each chart defines "NAME-OF-CHART.program". */}}
{{- define "culvert.command" -}}
{{- if .Values.command }}
{{- toYaml .Values.command }}
{{- else if eq (base .Values.image.repository) "culvert" }}
{{- toYaml (list (printf "/usr/bin/%s" (include (printf "%s.program" .Chart.Name) .))) }}
{{- end }}
{{- end }}

{{/* Fields of a container that do not depend on the program. */}}
{{- define "culvert.container" -}}
image: {{ include "culvert.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with include "culvert.command" . | trim }}
command: {{- . | nindent 2 }}
{{- end }}
{{- with .Values.resources }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.securityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "culvert.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | toYaml }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Fields of a pod that do not depend on the program. */}}
{{- define "culvert.pod" -}}
{{- include "culvert.pullSecrets" . }}
{{- with .Values.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.hostAliases }}
hostAliases: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Anti-affinity of the pods of a release, and spread constraints. `spread` has the kinds by topology. */}}
{{- define "culvert.spread" -}}
{{- if .Values.affinity }}
affinity: {{- toYaml .Values.affinity | nindent 2 }}
{{- else }}
{{- $preferred := list -}}
{{- $required := list -}}
{{- range $key, $kind := dict "kubernetes.io/hostname" .Values.spread.host "topology.kubernetes.io/zone" .Values.spread.zone }}
{{- $term := dict "topologyKey" $key "labelSelector" (dict "matchLabels" (fromYaml (include "culvert.selector" $))) }}
{{- if eq $kind "required" }}{{ $required = append $required $term }}{{ end }}
{{- if eq $kind "preferred" }}{{ $preferred = append $preferred (dict "weight" 100 "podAffinityTerm" $term) }}{{ end }}
{{- end }}
{{- if or $preferred $required }}
affinity:
  podAntiAffinity:
    {{- with $required }}
    requiredDuringSchedulingIgnoredDuringExecution: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $preferred }}
    preferredDuringSchedulingIgnoredDuringExecution: {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- end }}
{{- $constraints := list -}}
{{- range .Values.topologySpreadConstraints }}
{{- $selector := dict "matchLabels" (fromYaml (include "culvert.selector" $)) }}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" $selector)) }}
{{- end }}
{{- with $constraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Annotations of a pod. `port` and `path` are those of the metrics. */}}
{{- define "culvert.podAnnotations" -}}
{{- $root := .root -}}
{{- $scrape := dict -}}
{{- if $root.Values.monitoring.annotations }}
{{- $scrape = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .port) "prometheus.io/path" .path }}
{{- end }}
{{- with merge (deepCopy $root.Values.podAnnotations) $scrape }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes that are not empty, with an HTTP request if the values have no check of another kind. `host` is the address of the
health listener, `liveness` the path of the liveness probe, by default /healthz. For a listener on all addresses, the kubelet
uses the address of the pod. */}}
{{- define "culvert.probes" -}}
{{- $host := has .host (list "0.0.0.0" "::" "[::]") | ternary "" .host -}}
{{- range $kind, $path := dict "startup" "/healthz" "liveness" (.liveness | default "/healthz") "readiness" "/readyz" }}
{{- with index $.root.Values.probes $kind }}
{{- $get := dict "path" $path "port" "health" }}
{{- if $host }}{{ $get = set $get "host" $host }}{{ end }}
{{- $request := empty (or .exec .tcpSocket .grpc) | ternary (dict "httpGet" $get) dict }}
{{ $kind }}Probe: {{- toYaml (merge (deepCopy .) $request) | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "culvert.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "culvert.fullname" .) }}
{{- end }}

{{/* Errors that all charts have. */}}
{{- define "culvert.commonErrors" -}}
{{- if not .Values.image.registry }}
- image.registry is empty: no public registry has Culvert's images; build them with deploy/images/build and push them to a registry of your own
{{- else if not (regexMatch "^([a-zA-Z0-9.-]+|\\[[a-fA-F0-9:.]+\\])(:[0-9]+)?(/[a-z0-9._-]+)*$" .Values.image.registry) }}
- image.registry is {{ .Values.image.registry }}, which is not the name of a registry: set host, port and lower-case folders without scheme and final slash, such as registry.example.com/culvert
{{- end }}
{{- $podLabels := merge (fromYaml (include "culvert.podLabels" .)) (fromYaml (include (printf "%s.appLabels" .Chart.Name) .)) }}
{{- range $key, $_ := .Values.podLabels }}
{{- if hasKey $podLabels $key }}
- podLabels has {{ $key }}, which the chart sets: two labels with one key are not valid; remove {{ $key }} from podLabels
{{- end }}
{{- end }}
{{- if .Values.monitoring.podMonitor.enabled }}
{{- $labels := fromYaml (include "culvert.labels" .) }}
{{- range $key, $_ := .Values.monitoring.podMonitor.labels }}
{{- if hasKey $labels $key }}
- monitoring.podMonitor.labels has {{ $key }}, which the chart sets: two labels with one key are not valid; remove {{ $key }} from monitoring.podMonitor.labels
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Error of a rolling update that the API refuses. */}}
{{- define "culvert.updateErrors" -}}
{{- $none := list "0" "0%" -}}
{{- if and (has (toString .maxUnavailable) $none) (has (toString .maxSurge) $none) }}
- updateStrategy.maxUnavailable and updateStrategy.maxSurge are both 0: no pod could be replaced
{{- end }}
{{- end }}

{{/* Ends rendering with all errors of a chart. Each chart defines "NAME-OF-CHART.errors": one line for each error. */}}
{{- define "culvert.validate" -}}
{{- $errors := printf "%s\n%s" (include "culvert.commonErrors" .) (include (printf "%s.errors" .Chart.Name) .) | trim -}}
{{- if $errors }}{{ fail (printf "%s: these values contradict each other or are missing:\n%s" .Chart.Name (regexReplaceAll "\n+" $errors "\n")) }}{{ end }}
{{- end }}

{{/* Name of the pod of `helm test` and of its Service. */}}
{{- define "culvert.testName" -}}
{{ printf "%s-test" (include "culvert.fullname" . | trunc 58 | trimSuffix "-") }}
{{- end }}

{{/* Errors of Services with the same name. `services` has a pair for each rendered Service: the value that sets the name,
and the name. For two equal names, the error asks for a change of the earlier pair. */}}
{{- define "culvert.serviceErrors" -}}
{{- $services := .services -}}
{{- if .root.Values.tests.enabled }}{{ $services = append $services (list "tests.enabled" (include "culvert.testName" .root)) }}{{ end }}
{{- range $at, $one := $services }}
{{- range $other := slice $services (add1 $at | int) }}
{{- if eq (last $one) (last $other) }}
- the Services of {{ first $one }} and {{ first $other }} have the same name {{ last $one }}, so only one of them would exist; set {{ first $one }} to another name
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pod that requests `path` from the health listener of the release, and a Service for its name. With `all`, from pods
that are not ready, too. The pod runs on the nodes of the release. Its affinity has no rules about other pods: a required
anti-affinity would need one more node. */}}
{{- define "culvert.test" -}}
{{- $root := .root -}}
{{- $name := include "culvert.testName" $root -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name | toYaml }}
  namespace: {{ $root.Release.Namespace | toYaml }}
  labels: {{- include "culvert.labels" $root | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: "-1"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  clusterIP: None
  {{- if .all }}
  publishNotReadyAddresses: true
  {{- end }}
  selector: {{- include "culvert.selector" $root | nindent 4 }}
  ports:
    - name: health
      port: {{ .port }}
      targetPort: health
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ $name | toYaml }}
  namespace: {{ $root.Release.Namespace | toYaml }}
  labels:
    app.kubernetes.io/name: {{ include (printf "%s.name" $root.Chart.Name) $root }}-test
    app.kubernetes.io/instance: {{ $root.Release.Name | toYaml }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  {{- with include "culvert.pullSecrets" $root | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $root.Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.affinity }}
  {{- with .nodeAffinity }}
  affinity:
    nodeAffinity: {{- toYaml . | nindent 6 }}
  {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: test
      image: {{ $root.Values.tests.image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command:
        - sh
        - -c
        # The name resolves after the first pod is ready.
        - |
          for attempt in $(seq 60); do
            wget -q -O - "$URL" && exit 0
            sleep 1
          done
          exit 1
      env:
        - name: URL
          value: http://{{ $name }}.{{ $root.Release.Namespace }}.svc:{{ .port }}{{ .path }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      resources:
        requests: {cpu: 10m, memory: 10Mi}
        limits: {memory: 50Mi}
{{- end }}

{{/* Ingress rules for the health port: scrapers, and the pod of `helm test`. */}}
{{- define "culvert.healthIngress" -}}
{{- $root := .root -}}
{{- $from := $root.Values.networkPolicy.scrapeFrom -}}
{{- if $root.Values.tests.enabled }}
{{- $labels := dict "app.kubernetes.io/name" (printf "%s-test" (include (printf "%s.name" $root.Chart.Name) $root)) "app.kubernetes.io/instance" $root.Release.Name }}
{{- $from = append $from (dict "podSelector" (dict "matchLabels" $labels)) }}
{{- end }}
{{- with $from }}
- from: {{- toYaml . | nindent 4 }}
  ports:
    - port: {{ $.port }}
      protocol: TCP
{{- end }}
{{- end }}

{{/* Error of a policy that blocks Prometheus, for charts with `networkPolicy.scrapeFrom`. */}}
{{- define "culvert.scrapeErrors" -}}
{{- $v := .Values -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.scrapeFrom) (or $v.monitoring.annotations $v.monitoring.podMonitor.enabled) }}
- monitoring is enabled and networkPolicy.scrapeFrom is empty: the policy would block Prometheus; list the peers that scrape in networkPolicy.scrapeFrom, or set networkPolicy.enabled to false and keep a policy of your own
{{- end }}
{{- end }}

{{/* "true" if only the node itself reaches `address`. */}}
{{- define "culvert.isLoopback" -}}
{{- if or (eq . "localhost") (regexMatch "^(127\\.[0-9.]+|\\[?::1\\]?)$" .) }}true{{ end }}
{{- end }}

{{/* Error of a health listener that Prometheus does not reach. `name` is the value with its `address`. */}}
{{- define "culvert.loopbackErrors" -}}
{{- $monitoring := .root.Values.monitoring -}}
{{- if and (include "culvert.isLoopback" .address) (or $monitoring.annotations $monitoring.podMonitor.enabled) }}
- {{ .name }} is {{ .address }} and monitoring is enabled: Prometheus would not reach the listener; set monitoring.annotations and monitoring.podMonitor.enabled to false, or leave {{ .name }} empty
{{- end }}
{{- end }}

{{/* Type and annotations that expose a Service through the front door, as KKP's strategies do. `name` is the server name
of a TLS Service, `nodePort` the value of the annotation with NodePort. */}}
{{- define "culvert.expose" -}}
{{- $key := "nodeport-proxy.k8s.io/expose" -}}
{{- $type := "NodePort" -}}
{{- $annotations := dict -}}
{{- if eq .strategy "NodePort" }}{{ $annotations = dict $key .nodePort }}{{ end }}
{{- if eq .strategy "LoadBalancer" }}{{ $annotations = dict (printf "%s-namespaced" $key) "true" }}{{ end }}
{{- if eq .strategy "Tunneling" }}
{{- $type = "ClusterIP" }}
{{- $annotations = dict $key "Tunneling" }}
{{- with .name }}{{ $annotations = dict $key "SNI,Tunneling" "nodeport-proxy.k8s.io/port-mapping" (toJson (dict "secure" .)) }}{{ end }}
{{- end }}
{{- toYaml (dict "type" $type "annotations" $annotations) }}
{{- end }}

{{/* PodMonitor of the pods of the release. `others` has the values of app.kubernetes.io/name for more pods. */}}
{{- define "culvert.podMonitor" -}}
{{- $root := .root -}}
{{- $others := .others -}}
{{- with $root.Values.monitoring.podMonitor }}
{{- if .enabled }}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "culvert.fullname" $root | toYaml }}
  namespace: {{ $root.Release.Namespace | toYaml }}
  labels: {{- include "culvert.labels" $root | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    {{- with $others }}
    {{- $names := prepend . (include (printf "%s.name" $root.Chart.Name) $root) }}
    matchLabels:
      app.kubernetes.io/instance: {{ $root.Release.Name | toYaml }}
    matchExpressions:
      - {key: app.kubernetes.io/name, operator: In, values: [{{ join ", " $names }}]}
    {{- else }}
    matchLabels: {{- include "culvert.selector" $root | nindent 6 }}
    {{- end }}
  podMetricsEndpoints:
    - port: health
      path: {{ $.path }}
      {{- with .interval }}
      interval: {{ . }}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
