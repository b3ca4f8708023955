"""`surogate serve`: the endpoints of OpenAI's API for chat and completions, for trying and judging models.

`protocol.py` knows requests and answers as JSON, `models.py` what is loaded, `engine.py` batches, `server.py` HTTP.
"""

from __future__ import annotations

import ipaddress
import os
import signal
from argparse import Namespace
from pathlib import Path

from ..cli.arguments import UsageError
from ..errors import ConfigError, RunError
from ..logs.prometheus import parse
from ..terminal import show
from .engine import Engine
from .models import Models
from .server import Limits, Server

#: The variable that holds the token, for containers.
TOKEN = "SUROGATE_SERVE_TOKEN"

#: Seconds at the end for clients to take what their requests came to.
GRACE = 5.0

#: Characters of a token, at least: what is shorter can be guessed.
SHORTEST = 16


def run(options: Namespace) -> int:
    """Serves until a signal. Raises UsageError and ConfigError before a model is loaded."""
    host, port = _address(options.address)
    token = _token(options.token_file)
    if token is None and not _is_loopback(host):
        hint = f"set {TOKEN}, or --token-file FILE, or serve on 127.0.0.1"
        raise UsageError(f"--address {options.address} is reachable from other machines, and there is no token ({hint})")
    models = Models(options, _adapters(options.adapters))
    engine = Engine(models, options.max_sequences, options.max_waiting, options.max_tokens)
    limits = Limits(options.max_body, options.timeout, options.max_tokens, options.max_sequences)
    try:
        server = Server((host, port), engine, limits, token)
    except OSError as error:
        raise RunError(f"--address {options.address}: {error.strerror}") from error
    engine.load_first()
    shown = f"[{host}]" if ":" in host else host
    show(f"Serving {', '.join(engine.names())} at http://{shown}:{server.server_address[1]}/v1 (a chat page is at /)")
    # In order, so that answers in progress get an end.
    before = signal.signal(signal.SIGTERM, lambda *_: server.end())
    try:
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        return 130
    finally:
        engine.close()
        server.finish(GRACE)
        server.server_close()
        signal.signal(signal.SIGTERM, before)
    return 0


def _address(text: str) -> tuple[str, int]:
    try:
        host, port = parse(text)
        if not 0 <= port < 1 << 16:
            raise ValueError
    except ValueError:
        raise UsageError(f"--address {text}: expected HOST:PORT or PORT") from None
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(file: str | None) -> str | None:
    """The token of the file or of the variable; none without both."""
    text = os.environ.get(TOKEN)
    if file is not None:
        path = Path(file)
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path}: is open to other users, expected mode 0600 (chmod 600 {path})")
            text = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the token cannot be read: {error}") from None
    text = text.strip() if text else None
    if text is not None and not text.isascii():
        raise ConfigError("the token has characters that are not ASCII, which no header takes (openssl rand -hex 32 prints one)")
    if text is not None and len(text) < SHORTEST:
        raise ConfigError(f"the token has {len(text)} characters, expected at least {SHORTEST} (openssl rand -hex 32 prints one)")
    return text


def _adapters(words: list[str]) -> dict[str, str]:
    """Names of adapters with their folders."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or not name or not place or name in found:
            raise UsageError(f"--adapters {word}: expected NAME=DIR, each name once")
        found[name] = place
    return found
