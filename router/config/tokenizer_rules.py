"""Whether each model's tokenizer is on this machine, complete and unharmed, so that nothing is fetched later.

Rules of the file: it reads files and never the network, and loads no tokenizer. tiktoken names a file in its cache by
the SHA-1 of the file's URL, and when the content has another SHA-256 than expected it deletes the file and downloads
it again; both are looked at here first. Source: tiktoken, `load.py` and `tiktoken_ext/openai_public.py`.
"""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.config.document import Document
from router.config.problems import KeyPath
from router.config.schema import File, Tokenizer

_BLOBS = "https://openaipublic.blob.core.windows.net/"
#: Larger than any tokenizer.json in the field (Gemma's has 33 MB).
_FILE_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """One file of a tiktoken encoding."""

    url: str
    sha256: str

    @property
    def cache_name(self) -> str:
        return hashlib.sha1(self.url.encode(), usedforsecurity=False).hexdigest()


_R50K = VocabularyFile(
    _BLOBS + "encodings/r50k_base.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
)
_P50K = VocabularyFile(
    _BLOBS + "encodings/p50k_base.tiktoken", "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
)
_CL100K = VocabularyFile(
    _BLOBS + "encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
)
_O200K = VocabularyFile(
    _BLOBS + "encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
)
_GPT2 = (
    VocabularyFile(
        _BLOBS + "gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    ),
    VocabularyFile(
        _BLOBS + "gpt-2/encodings/main/encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    ),
)
ENCODINGS: Mapping[str, tuple[VocabularyFile, ...]] = {
    "gpt2": _GPT2,
    "r50k_base": (_R50K,),
    "p50k_base": (_P50K,),
    "p50k_edit": (_P50K,),
    "cl100k_base": (_CL100K,),
    "o200k_base": (_O200K,),
    "o200k_harmony": (_O200K,),
}


def tokenizer_path(tokenizer: Tokenizer, folder: Path, environ: Mapping[str, str]) -> Path | None:
    """Where its files are: `path` from the file's own `folder`, else tiktoken's cache as the environment names it."""
    if tokenizer.path is not None:
        return folder / tokenizer.path
    cache = environ.get("TIKTOKEN_CACHE_DIR")
    return Path(cache).absolute() if tokenizer.kind == "tiktoken" and cache else None


def check_tokenizers(document: Document, file: File, folder: Path, environ: Mapping[str, str]) -> None:
    """Notes every missing or broken file in `document`, with the way to supply it."""
    for number, model in enumerate(file.models):
        at: KeyPath = ("models", number, "tokenizer")
        tokenizer = model.tokenizer
        if document.is_bad((*at, "kind")) or document.is_bad((*at, "path")):
            continue
        if tokenizer.encoding is not None and tokenizer.kind != "tiktoken":
            document.note((*at, "encoding"), "is for kind tiktoken only", "Remove it, or set kind to tiktoken.")
        path = tokenizer_path(tokenizer, folder, environ)
        if tokenizer.kind == "huggingface":
            _check_huggingface(document, at, path)
        elif tokenizer.kind == "tiktoken":
            _check_tiktoken(document, at, tokenizer.encoding, path)
        elif tokenizer.path is not None:
            message = "is not used by kind estimate"
            document.note((*at, "path"), message, "Remove it, or set kind to huggingface or tiktoken.")


def _check_huggingface(document: Document, at: KeyPath, path: Path | None) -> None:
    for package in ("transformers", "tokenizers", "jinja2"):
        if importlib.util.find_spec(package) is None:
            document.note((*at, "kind"), f"needs the package {package}", f"Run `pip install {package}`.")
    supply = "Copy tokenizer.json and tokenizer_config.json of the served model there"
    if path is None:
        document.note(at, "kind huggingface needs a path", f"Set path to the model's folder. {supply}.")
        return
    where = (*at, "path")
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (path / name).is_file():
                document.note(where, f"the folder has no {name}", f"{supply}.")
            else:
                _check_json(document, where, path / name)
    elif path.is_file():
        _check_json(document, where, path)
    else:
        fix = f"{supply} (`hf download MODEL --include 'tokenizer*' --local-dir DIR` where there is a network)."
        document.note(where, "there is no such folder or file; the router downloads nothing", fix)


def _check_json(document: Document, where: KeyPath, path: Path) -> None:
    """A copy cut short, or a pointer of Git LFS, must not be found by the first request."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError
        is_object = isinstance(json.loads(path.read_bytes()), dict)
    except OSError as error:
        document.note(where, f"{path.name} cannot be read: {error.strerror}", "Give the router leave to read it.")
        return
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        document.note(where, f"{path.name} is not a tokenizer file in JSON", "Copy it from the model again, in full.")


def _check_tiktoken(document: Document, at: KeyPath, encoding: str | None, path: Path | None) -> None:
    if encoding is None:
        document.note(at, "kind tiktoken needs an encoding", f"Set encoding to one of {', '.join(ENCODINGS)}.")
        return
    files = ENCODINGS.get(encoding)
    if files is None:
        document.note((*at, "encoding"), "is no encoding of tiktoken", f"Write one of {', '.join(ENCODINGS)}.")
        return
    if path is None:
        message = "kind tiktoken needs the folder of its cache"
        document.note(at, message, "Set path, or the environment variable TIKTOKEN_CACHE_DIR.")
        return
    where = (*at, "path") if document.get((*at, "path")) is not None else at
    for vocabulary in files:
        fix = f"Put {vocabulary.url} into that folder under the name {vocabulary.cache_name}."
        try:
            content = (path / vocabulary.cache_name).read_bytes()
        except OSError:
            document.note(where, f"the cache folder has no file for {encoding}; the router downloads nothing", fix)
            continue
        if hashlib.sha256(content).hexdigest() != vocabulary.sha256:
            document.note(where, f"the cached file for {encoding} is damaged", fix)
