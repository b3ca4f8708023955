"""Downloads `s3://` and `gs://` objects to local files, and opens buckets for others. The engine sees only files.

obstore, the Python binding of the object_store library, does listing, signing, credentials and retries: the variables
`AWS_*` and `GOOGLE_*`, web identities and instance roles. Keys of the AWS profile are added here. Downloads are cached
by version and never repeated. The engine decides which files belong to a split.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from .. import _native
from ..errors import ConfigError, DataError, RunError
from . import files

if TYPE_CHECKING:
    from obstore import ObjectMeta

#: Files that are fetched at once.
AT_ONCE = 8

#: Times that a broken transfer is taken up again where it ended.
ATTEMPTS = 5

#: Bytes that are written at once.
BLOCK = 8 << 20

INSTALL = "buckets need obstore: pip install 'surogate[cloud]'"


def is_address(path: str) -> bool:
    """True if a dataset's path is in object storage."""
    return path.startswith(("s3://", "gs://"))


def data_files(path: str, subset: str | None, split: str, endings: tuple[str, ...]) -> list[Path]:
    """The local files of an object (known by the `endings` of its name), a pattern or a folder of a bucket: only those
    of the subset and split are fetched."""
    scheme, bucket, key = _parts(path)
    with _reported(path):
        of = store(scheme, bucket)
        objects = _objects(of, key, path, subset, split, endings)
        place = cache_folder() / origin(scheme) / quote(bucket, safe="")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda found: _fetched(of, found, place), objects))


def listed(path: str, subset: str | None, split: str, endings: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """The same objects as (address, bytes, version), without fetching them."""
    scheme, bucket, key = _parts(path)
    with _reported(path):
        objects = _objects(store(scheme, bucket), key, path, subset, split, endings)
    return [(f"{scheme}://{bucket}/{of['path']}", int(of["size"]), str(of.get("e_tag") or "")) for of in objects]


def fetch(address: str, size: int, tag: str, target: Path) -> None:
    """Writes an object to a file. Raises RunError where it is not the one of the size and entity tag that were listed."""
    scheme, bucket, key = _parts(address)
    with _reported(address), target.open("xb") as file:
        receive(store(scheme, bucket), {"path": key, "e_tag": tag}, file, size)


def _parts(path: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of an address."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise DataError(f"dataset `{path}`: an address has the form `{scheme}://bucket/path`")
    return scheme, bucket, key


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Raises RunError, with what helps, for what the library or the system refuses."""
    try:
        import obstore
    except ImportError as error:
        raise RunError(f"dataset `{path}`: {INSTALL}") from error
    try:
        yield
    except (obstore.exceptions.BaseError, OSError) as error:
        raise RunError(f"dataset `{path}`: {reason(error, path.partition('://')[0])}") from error


def cache_folder() -> Path:
    """The folder of fetched objects: SUROGATE_OBJECTS, else `surogate/objects` in the user's folder for caches."""
    if own := os.environ.get("SUROGATE_OBJECTS"):
        return Path(own)
    return _native.cache_folder("objects")


def store(scheme: str, bucket: str) -> Any:
    """A bucket, with the credentials of the environment."""
    from obstore.store import GCSStore, S3Store

    variable, endpoint = _endpoint(scheme)
    if endpoint and not _is_url(endpoint):
        # The library ends the process.
        raise ConfigError(f"{variable} is `{endpoint}`, expected `https://host` or `http://host:port`")
    options: dict[str, Any] = {"client_options": {"allow_http": True}} if endpoint.startswith("http://") else {}
    if scheme == "gs":
        return GCSStore(bucket, **options)
    return S3Store(bucket, **_profile(), **options)


def _endpoint(scheme: str) -> tuple[str, str]:
    """The variable that names the server of a scheme, and its value; empty for the usual server."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if scheme == "s3" else ("GOOGLE_BASE_URL",)
    return next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", ""))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _profile() -> dict[str, Any]:
    """Keys and region of the AWS profile, where the variables name none. Profiles without keys of their own are left to
    the variables: `aws configure export-credentials --format env` prints them."""
    home = Path.home() / ".aws"
    name = os.environ.get("AWS_PROFILE") or "default"
    values: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        parser.read(os.environ.get(variable) or home / file, encoding="utf-8")
        values |= dict(parser[section]) if parser.has_section(section) else {}
    found: dict[str, str] = {}
    if not os.environ.get("AWS_ACCESS_KEY_ID") and "aws_access_key_id" in values and "aws_secret_access_key" in values:
        names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
        names["aws_session_token"] = "session_token"
        found = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    if not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION") and "region" in values:
        found["region"] = values["region"]
    return found


def _objects(
    store: Any, key: str, path: str, subset: str | None, split: str, endings: tuple[str, ...]
) -> list[ObjectMeta]:
    """The objects that a path means, in the order in which they are read."""
    import obstore

    is_pattern = any(sign in key for sign in "*?[{")
    if is_pattern or key.endswith(endings):
        if subset is not None or split != "train":
            what = f"subset `{subset}`" if subset is not None else f"split `{split}`"
            raise DataError(f"dataset `{path}`: a file has no {what} (remove the option, or give the folder)")
        if not is_pattern:
            return [obstore.head(store, key)]
    parts = key.strip("/").split("/")
    plain = next((i for i, part in enumerate(parts) if any(sign in part for sign in "*?[{")), len(parts))
    prefix = "/".join(parts[:plain])
    below = f"{prefix}/" if prefix else ""
    listed = {of["path"].removeprefix(below): of for chunk in obstore.list(store, prefix or None) for of in chunk}
    if is_pattern:
        names = sorted(_native.matching_names("/".join(parts[plain:]), list(listed)))
        if not names:
            raise DataError(f"dataset `{path}`: no object matches this pattern")
        return [listed[name] for name in names]
    card = None
    if "README.md" in listed:
        card = bytes(obstore.get(store, below + "README.md").bytes()).decode("utf-8", errors="replace")
    return [listed[name] for name in _native.choose_files(path, list(listed), card, subset, split)]


def origin(scheme: str) -> str:
    """The scheme, distinguished by the server that the variables name."""
    _, server = _endpoint(scheme)
    return f"{scheme}-{hashlib.sha256(server.encode()).hexdigest()[:12]}" if server else scheme


def _fetched(store: Any, of: dict[str, Any], place: Path) -> Path:
    """The local copy of an object in the version that the listing reported."""
    key, size = of["path"], int(of["size"])
    version = f"{of.get('version') or ''}|{of.get('e_tag') or of['last_modified']}|{size}"
    *folders, name = (quote(part, safe="=+,@ ").replace("..", "%2E%2E") for part in key.split("/"))
    target = place.joinpath(*folders, hashlib.sha256(version.encode()).hexdigest()[:16], name)
    files.close_folders(cache_folder(), target.parent)
    if target.is_file() and target.stat().st_size == size and files.is_trusted(target):
        return target
    # Two processes may fetch the same object: each writes a file of its own, and both are the same.
    handle, unique = tempfile.mkstemp(prefix=f".{name[:64]}.", dir=target.parent)
    part = Path(unique)
    try:
        with open(handle, "wb") as file:
            receive(store, of, file, size)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def receive(store: Any, of: dict[str, Any], file: Any, size: int) -> None:
    """Writes the object; a transfer that breaks is taken up where it ended, as long as the object is the same."""
    import obstore

    options: dict[str, Any] = {"if_match": of["e_tag"]} if of.get("e_tag") else {}
    for attempt in range(ATTEMPTS + 1):
        begin = file.tell()
        if begin == size:
            return
        try:
            request: Any = options | ({"range": {"offset": begin}} if begin else {})
            for block in _blocks(obstore.get(store, of["path"], options=request)):
                file.write(block)
        except obstore.exceptions.PreconditionError:
            raise OSError(f"`{of['path']}` was replaced while it was read") from None
        except obstore.exceptions.BaseError:
            if attempt == ATTEMPTS:
                raise
    if file.tell() != size:
        raise OSError(f"`{of['path']}` ends after {file.tell()} of {size} bytes")


def _blocks(result: Any) -> Iterable[bytes]:
    return result.stream(min_chunk_size=BLOCK)


def reason(error: Exception, scheme: str) -> str:
    """The first line of what the library says, and what helps."""
    text = str(error).split("\n", 1)[0].strip()
    variables = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    open_to_all = "AWS_SKIP_SIGNATURE=true"
    if scheme == "gs":
        variables, open_to_all = "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE=true"
    if "NoSuchBucket" in str(error):
        return f"there is no such bucket ({text})"
    if isinstance(error, FileNotFoundError):
        return f"there is no such object ({text})"
    if isinstance(error, PermissionError) or any(word in str(error) for word in ("403", "401", "credential")):
        return f"access is refused: {text} (set {variables}; {open_to_all} for a bucket that is open to all)"
    if "redirect" in str(error):
        return f"{text} (set AWS_REGION to the bucket's region)"
    return text
