"""A stand-in for the Hub that holds one data set, on the loopback interface: enough for the real clients to stream it.

What it answers can be made to fail, by refusals or by breaking the connection.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.support.hub.server import HubServer

NAME, SHA = "me/rows", "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        files, cut = self.server.files, None
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.server.log.append((self.command, path, start))
        for fault in self.server.faults:
            if fault["left"] and re.search(fault["match"], f"{self.command} {path}") and start >= fault["from_byte"]:
                fault["left"] -= 1
                if fault["cut_after"] is None:
                    return self.reply(fault["status"], b'{"error": "injected fault"}')
                cut = fault["cut_after"]
                break
        info = {"id": NAME, "sha": SHA, "lastModified": "2026-01-01T00:00:00.000Z", "private": False, "tags": []}
        info |= {"siblings": [{"rfilename": name} for name in files], "disabled": False, "gated": False}
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        if re.fullmatch(rf"/api/datasets/{NAME}(/revision/\w+)?", path):
            return self.reply(200, json.dumps(info).encode())
        if path.startswith(f"/api/datasets/{NAME}/tree/"):
            # There are no folders.
            return self.reply(200, json.dumps(entries if path.endswith(SHA) else []).encode())
        if path.startswith(f"/api/datasets/{NAME}/paths-info/"):
            asked = re.findall(r"[\w./-]+", body.decode())
            return self.reply(200, json.dumps([entry for entry in entries if entry["path"] in asked]).encode())
        resolved = re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/(.+)", path)
        if resolved and resolved[1] in files:
            data = files[resolved[1]]
            headers = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
            if wanted:
                end = min(int(wanted[2]), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                return self.reply(206, data[start : end + 1], headers, cut)
            return self.reply(200, data, headers, cut)
        self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound" if resolved else "RepoNotFound"})

    def reply(self, status, data, headers=None, cut=None):
        self.send_response(status)
        for name, value in {
            "Content-Length": len(data),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = answer


class DataSetHub(ThreadingHTTPServer):
    """The Hub with the data set `NAME`. A context manager.

    Args:
        files: of the data set, their content by their names, which are in no folders.

    Attributes:
        log: of all requests: method, path and first byte.
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.log, self.faults = files, [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, match, times, status=503, from_byte=0):
        """Refuses that many requests whose "METHOD /path" has a match, of those for what is behind `from_byte`."""
        self.faults.append(
            {"match": match, "left": times, "status": status, "cut_after": None, "from_byte": from_byte}
        )

    def cut(self, match, times, after, from_byte=0):
        """Breaks the connection of such requests when so many bytes of the body have gone out."""
        self.faults.append({"match": match, "left": times, "cut_after": after, "from_byte": from_byte})

    def environment(self, home):
        """What a client has to run under, see `HubServer.environment`."""
        return HubServer.environment(self, home)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()
