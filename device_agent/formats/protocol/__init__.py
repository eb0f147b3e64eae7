"""The protocol between agent and coordinator, version 1, as plain dataclasses.

The coordinator generates its OpenAPI page from these classes, and the agent decodes messages into
these classes. So both sides always agree. All messages are JSON over HTTP, so a browser's `fetch`
can also send them.

    GET  /v1/invitation              join token   -> Invitation
    POST /v1/devices                 join token   JoinRequest -> JoinReply
    GET  /v1/work                    secret       -> Work
    GET  /v1/files/{sha256}          secret       -> bytes of one file of the offered bundle
    POST /v1/progress                secret       Progress ->
    GET  /v1/rounds/{round}/tensors/{sha256}  secret  -> Upload
    PUT  /v1/rounds/{round}/tensors/{sha256}  secret  bytes of update.safetensors ->
    POST /v1/rounds/{round}/update   secret       update.json -> Receipt
    POST /v1/rounds/{round}/evaluation  secret    Judgement -> Receipt
    POST /v1/problems                secret       SubmodelFailure -> Fallback
    POST /v1/stopped                 secret       Stopped ->
    POST /v1/releases/{number}       secret       ReleaseReport ->
    POST /v1/leave                   secret       ->
    GET  /v1/status                  secret or operator token -> Status

An interrupted transfer can continue. A GET of a file accepts `Range: bytes=N-` with the file's hash
as `If-Range`. Before a PUT of tensors, a device asks for the Upload of these tensors. It then sends
only the bytes after `received`, with the header `Upload-Offset`. Each device has at most one open
upload: a new upload ends the previous upload.

Tokens and secrets are sent as `Authorization: Bearer ...`. Every refusal is a Problem. A
coordinator that is starting answers every request with 503 and the code PREPARING. A coordinator
that plans submodels gives the same answer to a join if the device's submodel is not planned yet. A
request with this answer had no effect, so the device sends the request again.

A device generates an Ed25519 key pair, which identifies it, and signs its join. It does not sign
later requests, because for a signature it would have to read the body of an upload twice. Instead,
later requests contain the secret that the coordinator gave to the device.
"""
