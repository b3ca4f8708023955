"""`surogate push`: the result of a run, or any folder of a model or adapter, to a repository of the Hugging Face Hub.

Knows folders and names; tokens, mirrors and offline mode are huggingface_hub's.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from . import hub
from .errors import ConfigError
from .export import OF_CHECKPOINTS, result
from .terminal import show

#: What is tried with a repository, in messages.
UPLOADED = "uploaded to"


def run(options: Namespace) -> int:
    """Uploads and says where to."""
    place = Path(options.run)
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such folder; give the folder of a run, a model or an adapter")
    source = result(place)
    if options.name.count("/") != 1:
        raise ConfigError(f"{options.name} is not the name of a repository: names on the Hub have the form owner/name")
    prepare(options.name, not options.public)
    show(f"Uploaded {source}: {upload(source, options.name, not options.public)}")
    return 0


def prepare(name: str, private: bool) -> None:
    """Makes the repository, if there is none: whoever may not is refused before anything is trained."""
    from huggingface_hub import HfApi

    hub.call_hub(f"repository `{name}`", lambda: HfApi().create_repo(name, private=private, exist_ok=True), UPLOADED)


def upload(folder: Path, name: str, private: bool) -> str:
    """The address of the repository, which then holds the files of the folder."""
    from huggingface_hub import HfApi

    left_out = [*OF_CHECKPOINTS, ".*"]
    text = "Upload of a result by Surogate"
    hub.call_hub(
        f"repository `{name}`",
        lambda: HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message=text, ignore_patterns=left_out
        ),
        UPLOADED,
    )
    return f"{HfApi().endpoint}/{name}"
