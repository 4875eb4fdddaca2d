{{- /* What pods of all tiers have alike. */ -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/part-of: baton
{{- end }}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "baton.registry" -}}
{{- if .Values.redis.enabled -}}
redis://{{ .Release.Name }}-redis:6379/0
{{- else -}}
{{ required "registry: name a Redis, or set redis.enabled" .Values.registry }}
{{- end }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.podHead" -}}
# Variables of services would begin with BATON_ in a release of that name, and unknown ones are refused.
enableServiceLinks: false
automountServiceAccountToken: false
# Longer than BATON_DRAIN_TIMEOUT_S, which the process counts itself.
terminationGracePeriodSeconds: {{ add .root.Values.drainTimeoutS 15 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "baton.podSecurity" .root | nindent 2 }}
  fsGroup: 10001
# As far apart as there are nodes.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end }}

{{- define "baton.ports" -}}
- {name: grpc, containerPort: 50051}
# BATON_METRICS_PORT: for Prometheus.
- {name: metrics, containerPort: {{ .Values.metricsPort }}}
{{- end }}

{{- define "baton.mounts" -}}
- {name: model, mountPath: /model, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "baton.volumes" -}}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.claimName }}, readOnly: true}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
{{- end }}

{{- define "baton.fromBaton" -}}
- podSelector:
    matchLabels: {app.kubernetes.io/instance: {{ .Release.Name }}}
    matchExpressions:
      - {key: app.kubernetes.io/name, operator: In, values: [gateway, prefill, decode]}
{{- end }}

{{- define "baton.fromPrometheus" -}}
- from:
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          {{- toYaml .Values.networkPolicy.prometheus | nindent 10 }}
  ports:
    - {protocol: TCP, port: metrics}
{{- end }}
