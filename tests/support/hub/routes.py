"""What clients ask the Hub for, as far as pushing and pulling models goes, and the answers."""

import base64
import hashlib
import json
import os
import re
from urllib.parse import parse_qs, quote

from tests.support.hub.handler import REPO, BaseHandler, route
from tests.support.hub.store import HubError, card_metadata, git_oid, lfs_info, matches

LFS_SIZE = 10 * 1024 * 1024  # a file of this size is large, whatever its name
_CARD_TYPES = {
    "tags": list,
    "datasets": (list, str),
    "base_model": (list, str),
    "language": (list, str),
    "license": (str, list),
    "library_name": str,
    "pipeline_tag": str,
    "model-index": list,
}


class HubRoutes(BaseHandler):
    @route("GET", "/api/whoami-v2")
    def whoami(self):
        user = self.user(required=True)
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": user["role"]}}
        self.reply(200, {"type": "user", "name": user["name"], "fullname": user["name"], "orgs": [], "auth": access})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        metadata, error = card_metadata(self.json().get("content", ""))
        errors = [error] if error else []
        for key, types in _CARD_TYPES.items():
            if metadata and metadata.get(key) is not None and not isinstance(metadata[key], types):
                errors.append(f'"{key}" has the wrong type')
        warnings = [] if metadata or errors else [{"message": "empty or missing yaml metadata in repo card"}]
        body = {"errors": [{"message": error} for error in errors], "warnings": warnings}
        if errors:
            raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors), body=body)
        self.reply(200, body)

    @route("POST", "/api/repos/create")
    def create_repo(self):
        user, body = self.user(required=True), self.json()
        name, space = body["name"], body.get("organization") or user["name"]
        if user["role"] != "write" or not self.owns(space):
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{space}"')
        if not re.fullmatch(r"(?!.*(--|\.\.))\w([\w.-]{0,94}\w)?", name, re.ASCII):
            raise HubError(400, f"Invalid repo name: {name!r}")
        created = {"name": f"{space}/{name}", "url": f"{self.hub.url}/{space}/{name}"}
        with self.store.lock:
            if created["name"] in self.store.repos:  # the client reads the address from this refusal
                raise HubError(409, "exists", body={"error": "You already created this model repo", **created})
            self.store.create(created["name"], body.get("visibility") == "private")
        self.reply(200, created)

    @route("GET HEAD", REPO + "(?:/revision/([^/]+))?")
    def repo_info(self, name, revision):
        repo = self.repo(name)
        oid = self.store.resolve(repo, revision or "main")
        commit = repo["commits"][oid]
        card = card_metadata(self.store.text(commit["files"], "README.md"))[0] or {}
        config = json.loads(self.store.text(commit["files"], "config.json") or "{}")
        siblings = []
        for path, entry in sorted(commit["files"].items()):
            sizes = {"size": entry["size"], "blobId": entry["oid"], **lfs_info(entry, "sha256")}
            siblings.append({"rfilename": path, **(sizes if self.argument("blobs") else {})})
        info = {
            "_id": repo["key"],
            "id": name,
            "modelId": name,
            "author": name.split("/")[0],
            "sha": oid,
            "private": repo["private"],
            "gated": repo["gated"],
            "disabled": False,
            "lastModified": commit["date"],
            "tags": card.get("tags") or [],
            "library_name": card.get("library_name"),
            "pipeline_tag": card.get("pipeline_tag"),
            "cardData": card or None,
            "config": {key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config},
            "siblings": siblings,
        }
        self.reply(200, info)

    @route("PUT", REPO + "/settings")
    def settings(self, name):
        repo, body = self.repo(name, write=True), self.json()
        repo["gated"] = body.get("gated", repo["gated"])
        repo["private"] = body["visibility"] == "private" if "visibility" in body else repo["private"]
        self.reply(200, {"private": repo["private"], "gated": repo["gated"]})

    @route("GET", REPO + "/refs")
    def refs(self, name):
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
            for branch, oid in self.repo(name)["refs"].items()
        ]
        self.reply(200, {"converts": [], "branches": branches, "tags": [], "pullRequests": []})

    @route("POST", REPO + "/branch/([^/]+)")
    def create_branch(self, name, branch):
        repo, body = self.repo(name, write=True), self.json()
        with self.store.lock:
            if branch in repo["refs"]:
                raise HubError(409, f"Reference already exists: refs/heads/{branch}")
            if branch.startswith("refs/"):
                raise HubError(400, f"Invalid reference for a branch: {branch}")
            repo["refs"][branch] = self.store.resolve(repo, body.get("startingPoint") or "main")
        self.reply(200, {})

    @route("GET", REPO + "/commits/([^/]+)")
    def commits(self, name, revision):
        repo, found = self.repo(name), []
        oid = self.store.resolve(repo, revision)
        while oid:
            commit = repo["commits"][oid]
            found.append({"id": oid, "title": commit["title"], "message": "", "authors": [], "date": commit["date"]})
            oid = commit["parent"]
        self.paged(found, 50)

    def entries(self, files, under="", recursive=True):
        """The files and the folders in a folder, as the API lists them."""
        found, folders, prefix = [], {}, under and under + "/"
        for path, entry in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folders.setdefault(prefix + "/".join(parts[:depth]), []).append(path + entry["oid"])
            if recursive or len(parts) == 1:
                large = lfs_info(entry, "oid")
                if large:
                    large["xetHash"] = self.store.xet and self.store.xet.hash(entry["sha256"])
                found.append({"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"], **large})
        for path, contents in folders.items():
            oid = git_oid("".join(contents).encode(), b"tree")
            found.append({"type": "directory", "path": path, "oid": oid, "size": 0})
        return sorted(found, key=lambda item: item["path"])

    @route("GET", REPO + "/tree/([^/]+)(?:/(.+))?")
    def tree(self, name, revision, under):
        repo = self.repo(name)
        oid, under = self.store.resolve(repo, revision), (under or "").strip("/")
        found = self.entries(repo["commits"][oid]["files"], under, self.argument("recursive").lower() in ("true", "1"))
        if under and not found:
            headers = {"X-Repo-Commit": oid}
            raise HubError(404, f"{under} does not exist on {revision}", "EntryNotFound", headers)
        self.paged(found, 1000)

    @route("POST", REPO + "/paths-info/([^/]+)")
    def paths_info(self, name, revision):
        repo, form = self.repo(name), parse_qs(self.body().decode())
        files = repo["commits"][self.store.resolve(repo, revision)]["files"]
        by_path = {entry["path"]: entry for entry in self.entries(files)}
        paths = [path.strip("/") for path in form.get("paths", [])]
        self.reply(200, [by_path[path] for path in paths if path in by_path])

    @route("POST", REPO + "/preupload/([^/]+)")
    def preupload(self, name, revision):
        repo, body, found = self.repo(name, write=True), self.json(), []
        files = repo["commits"][self.store.resolve(repo, revision)]["files"]
        attributes = self.store.text(files, ".gitattributes").splitlines()
        patterns = [line.split()[0] for line in attributes if "filter=lfs" in line]
        # What a push brings along counts, else what is there.
        ignored = body.get("gitIgnore", self.store.text(files, ".gitignore"))
        ignored = [line.strip().strip("/") for line in ignored.splitlines() if line.strip() and line[0] != "#"]
        for file in body["files"]:
            path, entry = file["path"], files.get(file["path"])
            binary = b"\0" in base64.b64decode(file.get("sample") or "")
            large = matches(path, patterns) or file["size"] >= LFS_SIZE or binary
            # By this hash the client sees which files have not changed.
            oid = entry and (entry.get("sha256") or entry["oid"])
            mode = "lfs" if large else "regular"
            ignore = matches(path, ignored)
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": ignore, "oid": oid})
        self.reply(200, {"files": found})

    @route("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)")
    def lfs(self, name, what):
        self.repo(name, write=True)
        body, found = self.json(), []
        if what == "verify":
            if self.store.large_size(body["oid"]) != body["size"]:
                raise HubError(404, "Object not uploaded, or of another size")
            return self.reply(200, {})
        for wanted in body["objects"]:
            item = {"oid": wanted["oid"], "size": wanted["size"]}
            if self.store.large_size(wanted["oid"]) is None:
                verify = self.hub.url + self.path.replace("/batch", "/verify")
                upload = self.hub.signed("PUT", wanted["oid"])
                item["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            found.append(item)
        self.reply(200, {"transfer": "basic", "objects": found}, {"Content-Type": "application/vnd.git-lfs+json"})

    @route("POST", REPO + "/commit/([^/]+)")
    def commit(self, name, revision):
        repo = self.repo(name, write=True)
        operations = [json.loads(line) for line in self.body().splitlines() if line.strip()]
        header = next(operation["value"] for operation in operations if operation["key"] == "header")
        with self.store.lock:
            base, parent = self.store.resolve(repo, revision), header.get("parentCommit")
            if parent and not base.startswith(parent):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            if revision not in repo["refs"]:
                raise HubError(400, f"Cannot commit to {revision}: not a branch")
            files = dict(repo["commits"][base]["files"])
            changes = [operation for operation in operations if operation["key"] != "header"]
            for operation in changes:
                self.apply(files, operation["key"], operation["value"])
            oid = self.store.commit(repo, revision, files, header["summary"])
            repo["commits"][oid]["changed"] = [operation["value"]["path"] for operation in changes]
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def apply(self, files, kind, value):
        """Carries out one operation of a commit on its list of files."""
        path = value.get("path", "").strip("/")
        if kind in ("file", "lfsFile") and {"..", ".git", ""} & set(path.split("/")):
            raise HubError(400, f"Invalid path: {path!r}")
        if kind == "file":
            files[path] = self.store.add_regular(base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            files[path] = self.store.large_entry(value["oid"])
            if files[path] is None:
                raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
        elif kind in ("deletedFile", "deletedFolder"):
            inside = path + "/"
            gone = [file for file in files if file == path or (kind == "deletedFolder" and file.startswith(inside))]
            if not gone:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for file in gone:
                del files[file]

    @route("GET HEAD", r"(/api/resolve-cache/models)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
    def resolve(self, cached, name, revision, path):
        repo = self.repo(name, content=True)
        oid = self.store.resolve(repo, revision)
        entry = repo["commits"][oid]["files"].get(path)
        if entry is None:  # the commit lets the client remember that there is no such file
            raise HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": oid})
        headers = {"X-Repo-Commit": oid, "ETag": f'"{entry["oid"]}"', "Content-Type": "text/plain; charset=utf-8"}
        if "sha256" in entry:  # the client reads these from the redirect, which a HEAD does not follow
            headers["Location"] = self.hub.signed("GET", entry["sha256"])
            headers |= {"X-Linked-Size": entry["size"], "X-Linked-Etag": f'"{entry["sha256"]}"'}
            xet = self.store.xet and self.store.xet.hash(entry["sha256"])
            if xet:
                token = f"{self.hub.url}/api/models/{name}/xet-read-token/{oid}"
                headers |= {"X-Xet-Hash": xet, "Link": f'<{token}>; rel="xet-auth"'}
            return self.reply(302, headers=headers)
        if not cached:
            headers["Location"] = f"/api/resolve-cache/models/{name}/resolve/{oid}/{quote(path)}"
            return self.reply(307, headers=headers)
        self.reply(200, headers=headers, file=self.store.content(entry))

    @route("GET HEAD PUT", "/lfs/([0-9a-f]{64})", "storage")
    def large_file(self, oid):
        method, path = "GET" if self.command == "HEAD" else self.command, self.store.large(oid)
        self.check_signature(method, oid)
        if method == "GET":
            if not path.exists():
                raise HubError(404, "no such object")
            headers = {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"}
            return self.reply(headers=headers, file=path)
        digest, partial = hashlib.sha256(), self.store.partial()
        with open(partial, "wb") as opened:
            for data in self.chunks():
                digest.update(data)
                opened.write(data)
        if digest.hexdigest() != oid:
            raise HubError(400, "Content does not match its sha256")
        os.replace(partial, path)
        self.reply(200, headers={"ETag": f'"{oid}"'})
