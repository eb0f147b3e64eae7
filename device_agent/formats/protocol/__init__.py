"""The protocol between agent and coordinator, version 1, as plain dataclasses.

The coordinator generates its OpenAPI page from these classes and the agent decodes into them, so
both sides always agree. All messages are JSON over HTTP, usable from a browser's `fetch`.

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

An interrupted transfer can continue. A GET of a file takes `Range: bytes=N-` with the file's hash
as `If-Range`. Before a PUT of tensors a device asks for their Upload. It then sends only the bytes
after `received`, with the header `Upload-Offset`. Each device has at most one open upload: a new
upload ends the old one.

Tokens and secrets are sent as `Authorization: Bearer ...`. Every refusal is a Problem. A
coordinator that is starting answers every request with 503 and the code PREPARING. A coordinator
that is planning submodels gives the same answer to the join of a device whose submodel is not
planned yet. A request with this answer had no effect: send it again.

A device is identified by the Ed25519 key pair that it generates, and it signs its join. It does not
sign later requests: a signature would require reading the body of a streamed upload twice. Instead,
later requests contain the secret that the coordinator gave to the device.
"""
