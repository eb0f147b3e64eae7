"""Serves the built files, and the page for phones at `/join/`: encodings, caching and security.

These requests need no credentials. The page reads the join token from the fragment of its address,
which browsers do not send, and uses it in requests to the coordinator.
"""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from device_agent.formats.protocol.problems import Problem
from profiles.errors import InputError
from toolkit.web.built_page import HOW_TO_BUILD, INDEX, Page, PageFile

JOIN = "/join/"
PIECE = 1 << 16
"""Bytes that are sent at a time. A slow connection keeps only this much in memory."""
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; worker-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DENIED = (
    *("accelerometer", "camera", "display-capture", "geolocation", "gyroscope"),
    *("hid", "magnetometer", "microphone", "midi", "payment", "serial", "usb"),
)
"""Features of browsers that the page does not use: it takes pictures through a file field."""
SECURITY = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": ", ".join(
        ["screen-wake-lock=(self)", *(f"{feature}=()" for feature in DENIED)]
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
FOR_EVER = "public, max-age=31536000, immutable"
CODINGS = ("br", "gzip", "identity")
"""Content codings, the smallest first."""
ZERO = re.compile(r"q=0(\.0*)?")
NOT_BUILT = f"""\
<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>No page for phones</title>
<p>This coordinator has no page for phones: it was installed without it.</p>
<p>For its operator: {HOW_TO_BUILD.replace("`make web`", "<code>make web</code>")}, and start
<code>edgetailor serve</code> again.</p>
</html>
"""


def join_routes(page: Page | None, headers: Mapping[str, str] = NO_HEADERS) -> list[BaseRoute]:
    """Make the routes of the page, or of a notice that it was not built.

    `headers` are added to answers with files of the page.
    """

    async def answer(request: Request) -> Response:
        name = request.path_params["name"] or INDEX
        if page is None and name == INDEX:
            return HTMLResponse(NOT_BUILT, 503, SECURITY | {"Cache-Control": "no-store"})
        if page is None or name not in page:
            error = InputError(
                "The join page has no file {name!r}.", code="client.no-such-route", name=name
            )
            return _refusal(404, error)
        response = file_answer(request, page[name])
        response.headers.update(headers)
        return response

    async def redirect(request: Request) -> Response:
        # The path is relative, because a proxy may serve the coordinator below another path.
        return Response(status_code=308, headers=SECURITY | {"Location": "join/"})

    return [Route(JOIN.rstrip("/"), redirect), Route(f"{JOIN}{{name:path}}", answer)]


def file_answer(request: Request, file: PageFile) -> Response:
    """`file` in the first coding that `request` accepts."""
    accepted = ",".join(request.headers.getlist("accept-encoding"))
    accepted_codings = (
        coding for coding in CODINGS if coding in file.bodies and accepts(accepted, coding)
    )
    coding = next(accepted_codings, None)
    if coding is None:
        error = InputError(
            "{name} is stored only in brotli compression. Browsers accept brotli over https and "
            "from localhost: open the page in one of these ways.",
            code="client.no-brotli",
            name=file.name,
        )
        return _refusal(406, error)
    body, tag = file.bodies[coding], f'"{file.listed.sha256[:32]}-{coding}"'
    headers = SECURITY | {
        "Cache-Control": FOR_EVER if file.listed.immutable else "no-cache",
        "ETag": tag,
        "Vary": "Accept-Encoding",
    }
    if _has(",".join(request.headers.getlist("if-none-match")), tag):
        return Response(status_code=304, headers=headers)
    headers |= {"Content-Type": file.listed.type, "Content-Length": str(len(body))}
    if coding != "identity":
        headers["Content-Encoding"] = coding
    return StreamingResponse(_pieces(body), headers=headers)


def accepts(header: str, coding: str) -> bool:
    """Whether the value of Accept-Encoding accepts `coding` (RFC 9110, section 12.5.3)."""
    weights = {}
    for part in header.lower().split(","):
        name, _, weight = part.partition(";")
        weights[name.strip()] = ZERO.fullmatch(weight.strip()) is None
    return weights.get(coding, weights.get("*", coding == "identity"))


def _has(header: str, tag: str) -> bool:
    """Whether the value of If-None-Match names `tag`.

    A proxy may have marked the tag as weak (W/).
    """
    given = [entry.strip().removeprefix("W/") for entry in header.split(",")]
    return tag in given or "*" in given


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


def _refusal(status: int, error: InputError) -> Response:
    problem = Problem(code=error.code, message=str(error))
    return JSONResponse(asdict(problem), status, SECURITY | {"Vary": "Accept-Encoding"})
