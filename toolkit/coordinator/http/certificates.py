"""The coordinator's TLS certificate, reloaded when renewed, and a self-signed one for tests."""

import datetime
import ipaddress
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig

logger = logging.getLogger(__name__)

RENEWAL_S = 60.0
"""How often the files are checked for changes, in seconds."""
VALID_DAYS = 3650
"""A self-signed certificate is valid for long: every agent must learn the fingerprint of a new one.
"""
CERTIFICATE, KEY = "cert.pem", "key.pem"


class Certificate:
    """The certificate and the private key in two PEM files.

    Attributes:
        context: The TLS settings of the server's socket.
        fingerprint: SHA-256 of the certificate if it is self-signed; otherwise None. Only devices
            that know the fingerprint accept a self-signed certificate.

    Raises:
        InputError: The files cannot be read, or do not belong together.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._times()
        self.context = _context(certificate, key)
        self.fingerprint = _own_fingerprint(certificate)

    def renew(self) -> None:
        """If the files have changed, use them for new connections.

        While the new files cannot be used, for example if only one of them is new, the old
        certificate stays in use.
        """
        seen = self._times()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            # Load the files into a separate context first: a wrong key would leave `context`
            # without a key.
            _context(*self._files)
            self.context.load_cert_chain(*self._files)
        except (InputError, OSError) as error:
            logger.warning("The renewed certificate is not used: %s", error)
        else:
            logger.info("New connections get the renewed certificate %s.", self._files[0])

    def _times(self) -> list[int]:
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in self._files]


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With an empty password, OpenSSL does not ask on the terminal for the password of the key.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # includes SSLError
        why = error.strerror if not isinstance(error, ssl.SSLError) else _reason(error)
        raise InputError(
            "`tls_cert` {certificate} and `tls_key` {key} cannot be used: {reason}. Give a "
            "certificate with its chain, and its unencrypted private key, as PEM files.",
            code="service.unusable-certificate",
            certificate=str(certificate),
            key=str(key),
            reason=why,
        ) from None
    return context


def _reason(error: ssl.SSLError) -> str:
    reasons = {"KEY_VALUES_MISMATCH": "the key belongs to another certificate"}
    return reasons.get(error.reason or "", "they are not PEM files of a certificate and its key")


def _own_fingerprint(path: Path) -> str | None:
    own = x509.load_pem_x509_certificate(path.read_bytes())
    return own.fingerprint(hashes.SHA256()).hex() if own.issuer == own.subject else None


def certificate_of(config: CoordinatorConfig) -> Certificate | None:
    """The certificate that `config` names, if any. Raises InputError if it cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificate(config.tls_cert, config.tls_key)


def new_certificate(folder: Path, names: Sequence[str]) -> str:
    """Write a self-signed certificate and its private key.

    Args:
        folder: The folder for `cert.pem` and `key.pem`; created if it does not exist.
        names: Host names and IP addresses of the coordinator.

    Returns:
        The certificate's fingerprint, a SHA-256.

    Raises:
        InputError: The folder holds one of the files already, or cannot be written.

    Examples:
        >>> len(new_certificate(getfixture("tmp_path"), ["coordinator.lan", "192.168.1.10"]))
        64
    """
    for name in (CERTIFICATE, KEY):
        if (folder / name).exists():
            raise InputError(
                "{path} exists. Agents that have joined with this certificate would refuse another "
                "one. Choose another folder, or remove the files first.",
                code="service.certificate-exists",
                path=str(folder / name),
            )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Valid from a day ago, for devices whose clock is behind.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / KEY, pem, mode=0o600)
        write_file(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise InputError(
            "{path} cannot be written ({reason}): give another folder.",
            code="service.certificate-not-written",
            path=str(folder),
            reason=error.strerror,
        ) from None
    return certificate.fingerprint(hashes.SHA256()).hex()


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
