"""Servers that are no coordinators: pages of other programs, and certificates of every kind."""

import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


class Page(http.server.BaseHTTPRequestHandler):
    date = "Sat, 01 Jan 2000 00:00:00 GMT"
    body = b"<html>"
    status = 401

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(self.status)
        self.send_header("Date", self.date)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def page(
    certificate: Path | None = None, context: ssl.SSLContext | None = None, **fields: object
) -> Iterator[int]:
    """The port of a server that has `fields` for its pages, with TLS where it has a certificate."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("P", (Page,), fields))
    if certificate is not None:
        context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def certificate(
    folder: Path, name: str, begins: datetime.timedelta, ends: datetime.timedelta
) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + begins)
        .not_valid_after(NOW + ends)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))]), False
        )
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(pem))
    return path
