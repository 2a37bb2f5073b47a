"""What the stand-in for the Hub keeps: repositories with their commits, and the contents of files by their hashes."""

import fnmatch
import hashlib
import json
import os
import re
import secrets
import threading
from datetime import datetime, timezone
from pathlib import Path

import yaml

_LARGE = """*.bin *.ckpt *.gz *.h5 *.joblib *.model *.msgpack *.npy *.npz *.onnx *.parquet *.pickle *.pkl *.pt *.pth
*.safetensors saved_model/**/* *.tar *.tflite *.zip *tfevents*"""
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in _LARGE.split())


class HubError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(self, status, message, code=None, headers=None, body=None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers, self.body = status, message, code, headers or {}, body


def git_oid(data, kind=b"blob"):
    return hashlib.sha1(kind + b" %d\0" % len(data) + data).hexdigest()


def pointer(sha256, size):
    """What git keeps in the place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def lfs_info(entry, name):
    """How the Hub describes a large file, its hash called `name`; nothing for another."""
    if "sha256" not in entry:
        return {}
    size = entry["size"]
    return {"lfs": {name: entry["sha256"], "size": size, "pointerSize": len(pointer(entry["sha256"], size))}}


def matches(path, patterns):
    """Whether git's patterns name a path: those without a slash its last part alone."""
    return any(
        fnmatch.fnmatch(path, pattern.replace("**/", "*"))
        or ("/" not in pattern and fnmatch.fnmatch(path.split("/")[-1], pattern))
        for pattern in patterns
    )


def card_metadata(text):
    """The YAML block of a card, and what is wrong with it; each None if there is none."""
    block = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n?---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if not block:
        return None, None
    try:
        data = yaml.safe_load(block[1]) or {}
    except yaml.YAMLError as error:
        return None, f"bad YAML: {error}"
    return (data, None) if isinstance(data, dict) else (None, "metadata must be a mapping")


class Store:
    """Repositories in memory, each commit with its whole list of files, and the contents in a folder.

    An entry of a list of files has its `oid` and `size`, and, if it is a large file, its `sha256`.
    """

    def __init__(self, root, tokens):
        self.root, self.tokens, self.repos, self.xet = Path(root), tokens, {}, None
        self.lock = threading.RLock()
        for folder in ("regular", "large", "partial"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def partial(self):
        """A file to write to, before it is renamed to where it belongs."""
        return self.root / "partial" / secrets.token_hex(8)

    def write(self, path, data):
        partial = self.partial()
        partial.write_bytes(data)
        os.replace(partial, path)

    def large(self, sha256):
        return self.root / "large" / sha256

    def content(self, entry):
        return self.large(entry["sha256"]) if "sha256" in entry else self.root / "regular" / entry["oid"]

    def text(self, files, path):
        """The content of a small file; empty if there is none."""
        entry = files.get(path)
        return self.content(entry).read_text("utf-8", "replace") if entry and "sha256" not in entry else ""

    def add_regular(self, data):
        oid = git_oid(data)
        self.write(self.root / "regular" / oid, data)
        return {"oid": oid, "size": len(data)}

    def large_entry(self, sha256):
        """The entry of a large file; None if it was not uploaded."""
        size = self.large_size(sha256)
        return None if size is None else {"oid": git_oid(pointer(sha256, size)), "size": size, "sha256": sha256}

    def large_size(self, sha256):
        path = self.large(sha256)
        if path.exists():
            return path.stat().st_size
        return self.xet and self.xet.size(sha256)

    def create(self, name, private):
        repo = {
            "id": name,
            "key": secrets.token_hex(12),
            "private": private,
            "gated": False,
            "refs": {},
            "commits": {},
        }
        self.repos[name] = repo
        self.commit(repo, "main", {".gitattributes": self.add_regular(GIT_ATTRIBUTES.encode())}, "initial commit")

    def commit(self, repo, branch, files, title):
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        commit = {"parent": repo["refs"].get(branch), "files": files, "title": title, "date": date}
        # Two commits with the same files in the same millisecond are still two.
        oid = git_oid(json.dumps([repo["key"], commit, secrets.token_hex(4)]).encode(), b"commit")
        repo["commits"][oid], repo["refs"][branch] = commit, oid
        return oid

    def resolve(self, repo, revision):
        """The commit that a branch or the beginning of a hash names."""
        if revision in repo["refs"]:
            return repo["refs"][revision]
        hashed = re.fullmatch(r"[0-9a-f]{7,40}", revision)
        found = [commit for commit in repo["commits"] if commit.startswith(revision)] if hashed else []
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]
