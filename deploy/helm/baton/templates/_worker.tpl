{{- /* A worker's pod. Of name, worker and host: "only", or one of several: "first", which serves, or "other", which computes with
it. */ -}}

{{- define "baton.workerPod" -}}
metadata:
  labels:
    {{- include "baton.labels" . | nindent 4 }}
  annotations:
    # A change of the shared options starts the pods anew.
    baton/config: {{ include (print .root.Template.BasePath "/config.yaml") .root | sha256sum }}
    {{- with .worker.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "baton.podHead" . | nindent 2 }}
  {{- with .worker.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .worker.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ .root.Values.images.worker }}
      args:
        - {{ .name }}
        - --host=0.0.0.0
        # The network policy keeps strangers out; with certificates or keys this goes: docs/security.md.
        - --insecure
        - --port=50051
        {{- if eq .host "first" }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --master-addr=$(BATON_KV_HOST)
        {{- else if eq .host "other" }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- end }}
        {{- range $name, $value := .worker.options }}
        {{- if not (kindIs "invalid" $value) }}
        - {{ printf "--%s=%v" $name $value | quote }}
        {{- end }}
        {{- end }}
        - /model
      envFrom: [configMapRef: {name: {{ .root.Release.Name }}-baton}]
      env:
        - {name: HF_HUB_OFFLINE, value: "1"}
        - {name: HOME, value: /tmp}
        - name: BATON_WORKER_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        # KV is listened for, on any free port, and given to senders, under the pod's own address.
        - name: BATON_KV_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        # Under which gateways find it, by the registry.
        - name: BATON_ADVERTISE_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- if ne .host "other" }}
      ports:
        {{- include "baton.ports" .root | nindent 8 }}
      # Health is that of the engine loop: one that has not turned for three seconds is NOT_SERVING.
      startupProbe:
        grpc: {port: 50051}
        periodSeconds: 5
        failureThreshold: 120
      readinessProbe:
        grpc: {port: 50051}
        periodSeconds: 5
      livenessProbe:
        grpc: {port: 50051}
        periodSeconds: 10
        failureThreshold: 6
      {{- end }}
      resources:
        {{- toYaml .worker.resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "baton.mounts" .root | nindent 8 }}
  volumes:
    {{- include "baton.volumes" .root | nindent 4 }}
{{- end }}
