"""Who is at the other end of a QUIC connection, as https://github.com/libp2p/specs/blob/master/tls/tls.md says.

A self-signed certificate carries the peer's key and its signature over the certificate's.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarmnode.node.host.addresses import ED25519_PREFIX, public_key
from swarmnode.node.identity import peer_id_of
from swarmnode.protocols.network import PeerId

EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
SIGNED = b"libp2p-tls-handshake:"  # stands before the certificate's key in what the peer's key signs
# The extension, in DER: a sequence of 104 bytes, in it a string of 36, the protobuf of an Ed25519 key; and one of 64.
BEFORE_KEY = bytes.fromhex("30680424") + ED25519_PREFIX[2:]
BEFORE_SIGNATURE = bytes.fromhex("0440")
VALID = timedelta(days=36500)  # of a certificate; it lives as long as the program


def certificate_for(key: Ed25519PrivateKey) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate that names `key` as its owner's, with the certificate's own key, made for it."""
    own = ec.generate_private_key(ec.SECP256R1())
    named = own.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    owner = BEFORE_KEY + key.public_key().public_bytes_raw() + BEFORE_SIGNATURE + key.sign(SIGNED + named)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "libp2p")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.UnrecognizedExtension(EXTENSION, owner), critical=False)
        .sign(own, SHA256())
    )
    return made, own


def peer_in(certificate: x509.Certificate | None) -> PeerId:
    """Whose certificate it is. Raises ValueError where it does not prove it, or is not that of an Ed25519 key."""
    if certificate is None:
        raise ValueError("there is none")
    if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
        raise ValueError("it is not valid at this time")
    try:
        extension = certificate.extensions.get_extension_for_oid(EXTENSION).value
        assert isinstance(extension, x509.UnrecognizedExtension)
        start, rest = extension.value[:8], extension.value[8:]
        key, middle, signature = rest[:32], rest[32:34], rest[34:]
        if start != BEFORE_KEY or middle != BEFORE_SIGNATURE or len(signature) != 64:
            raise ValueError("it names no Ed25519 key")
        peer = peer_id_of(key)
        named = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        public_key(peer).verify(signature, SIGNED + named)
        certificate.verify_directly_issued_by(certificate)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, InvalidSignature, TypeError) as error:
        raise ValueError(f"{type(error).__name__}") from error
    return peer
