"""A stand-in for the Hub on the loopback interface: enough of its protocol for the real clients to push and pull.

As with the real one there are two origins, the Hub and a storage for large files whose addresses are signed; the
second must never see a token.
"""

import hmac
import os
import secrets
import tempfile
import threading
import time
from http.server import ThreadingHTTPServer

from tests.support.hub.routes import HubRoutes
from tests.support.hub.store import Store
from tests.support.hub.xet import Xet, XetRoutes

# Who has which token, and what they may do.
WRITE, READ, OTHER = "hf_writewritewrite", "hf_readreadread", "hf_otherotherother"
TOKENS = {WRITE: ("me", "write"), READ: ("me", "read"), OTHER: ("other", "write")}

_OTHER_SETTINGS = {
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Handler(XetRoutes, HubRoutes):
    pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, hub, origin):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub, self.origin = hub, origin
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class HubServer:
    """The Hub, and the storage behind it. A context manager.

    Args:
        tokens: who has which token, and whether it may "write" or just "read".

    Attributes:
        log: of all requests.
        errors: what went wrong in the server, and `unhandled` what it was asked for and has no answer to. A test
            should end with both empty.
    """

    def __init__(self, tokens):
        self.folder = tempfile.TemporaryDirectory(prefix="regard-hub-")
        users = {token: {"name": name, "role": role} for token, (name, role) in tokens.items()}
        self.store = Store(self.folder.name, users)
        self.store.xet = Xet(self)
        self.log, self.errors, self.unhandled, self.faults = [], [], [], []
        self.key, self.lock = secrets.token_bytes(16), threading.Lock()
        self.servers = [Server(self, "hub"), Server(self, "storage")]
        self.url, self.storage_url = (server.url for server in self.servers)

    def record(self, **request):
        with self.lock:
            self.log.append(request)

    def requests(self, method, part):
        """The requests of a method whose path has a part, in order."""
        return [request for request in self.log if request["method"] == method and part in request["path"]]

    def commits(self, repo_id):
        """The commits of a repository, the first first, by their hashes."""
        return self.store.repos[repo_id]["commits"]

    def files(self, repo_id, branch="main"):
        """What lies on a branch of a repository, by the paths."""
        repo = self.store.repos[repo_id]
        return repo["commits"][repo["refs"][branch]]["files"]

    def text(self, repo_id, path):
        """The content of a small file; empty if there is none."""
        return self.store.text(self.files(repo_id), path)

    def sign(self, text):
        return hmac.new(self.key, text.encode(), "sha256").hexdigest()

    def signed(self, method, oid, folder="lfs"):
        expiry = int(time.time()) + 3600
        return f"{self.storage_url}/{folder}/{oid}?exp={expiry}&sig={self.sign(f'{method}:{oid}:{expiry}')}"

    def fail(self, match, status=503, message="injected fault"):
        """Refuses the next request whose "METHOD /path" has a match."""
        self.faults.append({"match": match, "status": status, "message": message, "left": 1, "cut_after": None})

    def cut(self, match, after, times=1):
        """Breaks the connection of such requests when so many bytes of a body have come in, or gone out."""
        self.faults.append({"match": match, "left": times, "cut_after": after})

    def environment(self, home, token=None, xet=False):
        """What a client has to run under: this Hub, and no settings of the user's."""
        prefixes = ("ACCELERATE_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        mode = {} if xet else {"HF_HUB_DISABLE_XET": "1"}
        account = {} if token is None else {"HF_TOKEN": token}
        return {**own, "HF_ENDPOINT": self.url, "HF_HOME": str(home), **_OTHER_SETTINGS, **mode, **account}

    def __enter__(self):
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self.folder.cleanup()
