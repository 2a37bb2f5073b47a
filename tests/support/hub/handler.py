"""How the stand-in for the Hub takes requests and answers them, whatever they ask for."""

import json
import re
import secrets
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub.store import HubError

ROUTES = []  # (origin, methods, pattern of the path, name of the handler's method)
REPO = r"/api/models/([^/]+/[^/]+)"


def route(methods, pattern, origin="hub"):
    """Has a method of the handler answer what matches; the groups of the pattern are its arguments."""

    def add(function):
        ROUTES.append((origin, methods.split(), re.compile(pattern), function.__name__))
        return function

    return add


class ConnectionCut(ConnectionError):
    """The connection is to break now, on purpose."""


class BaseHandler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 60
    wbufsize, disable_nagle_algorithm = -1, True  # else a delayed acknowledgement adds 40 ms to an answer

    @property
    def hub(self):
        return self.server.hub

    @property
    def store(self):
        return self.server.hub.store

    def log_message(self, *args):
        pass

    def chunks(self):
        """The body of the request, piece by piece."""
        self.drained, chunked = True, "chunked" in self.headers.get("Transfer-Encoding", "").lower()
        left = int(self.headers.get("Content-Length") or 0)
        while True:
            if chunked and not left:
                left = int(self.rfile.readline().split(b";")[0], 16)
                if not left:
                    self.rfile.readline()
            if not left:
                return
            data = self.rfile.read(min(left, 1 << 16))
            if not data:
                raise ConnectionError("the body was cut short")
            left -= len(data)
            self.received += len(data)
            if self.cut_after is not None and self.received >= self.cut_after:
                raise ConnectionCut
            if chunked and not left:
                self.rfile.readline()
            yield data

    def body(self):
        return b"".join(self.chunks())

    def json(self):
        try:
            return json.loads(self.body() or b"{}")
        except ValueError:
            raise HubError(400, "Body is not valid JSON") from None

    def argument(self, name, default=""):
        return self.query.get(name, [default])[0]

    def reply(self, status=200, content=None, headers=None, raw=None, file=None):
        """AnswerMetrics with JSON, with bytes, or with a file or the range of it that was asked for."""
        headers, start = dict(headers or {}), 0
        if file:
            size = file.stat().st_size
            end = size - 1
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if wanted:
                start = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
                end = min(int(wanted[2]), end) if wanted[1] and wanted[2] else end
                if start >= size:
                    headers = {"Content-Range": f"bytes */{size}"}
                    return self.reply(416, {"error": "Range not satisfiable"}, headers)
                status, headers["Content-Range"] = 206, f"bytes {start}-{end}/{size}"
            length = end - start + 1
            headers["Accept-Ranges"] = "bytes"
        else:
            if raw is None:
                raw = b"" if content is None else json.dumps(content).encode()
                headers.setdefault("Content-Type", "application/json; charset=utf-8")
            length = len(raw)
        if not self.drained:  # what the client still sends would be taken for its next request
            for _ in self.chunks():
                pass
        self.status = status
        self.send_response(status)
        for name, value in {"X-Request-Id": secrets.token_hex(8), "Content-Length": length, **headers}.items():
            if value is not None:
                self.send_header(name, " ".join(str(value).split()).encode("ascii", "replace").decode())
        self.end_headers()
        if self.command != "HEAD":
            self.write_file(file, start, length) if file else self.wfile.write(raw)
        self.wfile.flush()

    def write_file(self, file, start, length):
        if self.cut_after is not None and self.cut_after < length:
            length, cut = self.cut_after, True
        else:
            cut = False
        with open(file, "rb") as opened:
            opened.seek(start)
            while length > 0:
                length -= self.wfile.write(opened.read(min(length, 1 << 16)))
        if cut:
            self.wfile.flush()
            raise ConnectionCut

    def paged(self, items, per_page):
        start = int(self.argument("cursor", "0"))
        others = "&".join(f"{name}={quote(value[0])}" for name, value in self.query.items() if name != "cursor")
        following = f"{self.hub.url}{urlsplit(self.path).path}?{others}&cursor={start + per_page}"
        link = f'<{following}>; rel="next"' if len(items) > start + per_page else None
        self.reply(200, items[start : start + per_page], {"Link": link})

    def handle_request(self):
        self.received, self.status, self.drained, self.cut_after = 0, 0, False, None
        url = urlsplit(self.path)
        self.query = parse_qs(url.query, keep_blank_values=True)
        try:
            self.find_fault()
            for origin, methods, pattern, name in ROUTES:
                found = pattern.fullmatch(url.path)
                if origin == self.server.origin and self.command in methods and found:
                    # Segments are told apart before they are unquoted: a branch may have a slash in its name.
                    return getattr(self, name)(*(group and unquote(group) for group in found.groups()))
            self.hub.unhandled.append(f"{self.command} {self.path}")
            raise HubError(404, f"no such route: {self.command} {url.path}")
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message, **error.headers}
            self.reply(error.status, error.body or {"error": error.message}, headers)
        except (ConnectionError, TimeoutError) as error:
            self.status = "cut" if isinstance(error, ConnectionCut) else self.status
            self.close_connection = True
        except Exception as error:
            self.hub.errors.append(f"{self.command} {self.path}: {type(error).__name__}: {error}")
            self.reply(500, {"error": "Internal error"})
        finally:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self.hub.record(
                origin=self.server.origin,
                method=self.command,
                path=self.path,
                status=self.status,
                received=self.received,
                hub_token=token in self.store.tokens,
            )

    def find_fault(self):
        for fault in self.hub.faults:
            if fault["left"] > 0 and re.search(fault["match"], f"{self.command} {self.path}"):
                fault["left"] -= 1
                if fault["cut_after"] is None:
                    raise HubError(fault["status"], fault["message"])
                self.cut_after = fault["cut_after"]

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def user(self, required=False):
        """Who is asking; None for nobody."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token:
            if token not in self.store.tokens:  # refused for public repositories too, and without an error code
                raise HubError(401, "Invalid credentials in Authorization header")
            return self.store.tokens[token]
        if required:
            raise HubError(401, "Invalid username or password.")
        return None

    def owns(self, name):
        user = self.user()
        return user is not None and name.split("/")[0] == user["name"]

    def repo(self, name, write=False, content=False):
        """A repository, if the one who asks may read it, write to it, or have the content of its files."""
        user, repo, owns = self.user(), self.store.repos.get(name), self.owns(name)
        if repo is None or (repo["private"] and not owns):  # one may not learn that there is a private one
            message = "Repository not found" if user else "Invalid username or password."
            raise HubError(404 if user else 401, message, "RepoNotFound")
        if write:
            if self.user(required=True)["role"] != "write":
                raise HubError(403, "you must use a write token to upload to a repository")
            if not owns:
                raise HubError(403, "Authorization error")
        if content and repo["gated"] and not owns:
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            raise HubError(403 if user else 401, message, "GatedRepo")
        return repo

    def check_signature(self, method, oid):
        expiry = self.argument("exp", "0")
        if self.hub.sign(f"{method}:{oid}:{expiry}") != self.argument("sig") or int(expiry) < time.time():
            raise HubError(403, "Access denied: bad or expired signature")
