"""The storage that clients with `hf_xet` put large files into, in chunks: version 1 of its API.

Such a client sends every large file that way, unless `HF_HUB_DISABLE_XET` is set.
"""

import re
import struct
import time

from tests.support.hub.handler import REPO, BaseHandler, route
from tests.support.hub.store import HubError


def hexed(raw):
    """A hash is written as four little-endian numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


def parse_shard(data):
    """The files of a shard by their hashes. Their terms: a xorb, a length, the first chunk, the end of the chunks."""
    at, found = 48, {}
    while at + 48 <= len(data) and data[at : at + 32] != b"\xff" * 32:
        name, (flags, count) = hexed(data[at : at + 32]), struct.unpack_from("<II", data, at + 32)
        starts = range(at + 48, at + 48 * (count + 1), 48)
        terms = [(hexed(data[start : start + 32]), *struct.unpack_from("<3I", data, start + 36)) for start in starts]
        verified, described = flags >> 31 & 1, flags >> 30 & 1
        at += 48 * (count + 1) + 48 * count * verified
        sha256 = None
        if described:
            sha256, at = hexed(data[at : at + 32]), at + 48
        found[name] = {"sha256": sha256, "size": sum(term[1] for term in terms), "terms": terms}
    return found


def chunk_offsets(data):
    """Where the chunks of a xorb begin. Headers hold a version, which is 0, size, how it is packed, raw size."""
    offsets = [0]
    while offsets[-1] + 8 <= len(data) and data[offsets[-1]] == 0:  # the footer begins with something else
        start = offsets[-1]
        offsets.append(start + 8 + int.from_bytes(data[start + 1 : start + 4], "little"))
    return offsets


class Xet:
    """The files that came this way."""

    def __init__(self, hub):
        self.hub, self.files, self.by_sha256, self.xorbs = hub, {}, {}, {}

    def add(self, files):
        self.files.update(files)
        self.by_sha256.update({file["sha256"]: name for name, file in files.items() if file["sha256"]})

    def hash(self, sha256):
        return self.by_sha256.get(sha256)

    def size(self, sha256):
        return self.files[self.by_sha256[sha256]]["size"] if sha256 in self.by_sha256 else None

    def token(self, scope):
        expiry = int(time.time()) + 3600
        return f"{scope}:{expiry}:{self.hub.sign(f'{scope}:{expiry}')}", expiry


class XetRoutes(BaseHandler):
    @route("GET", REPO + "/(xet-read|xet-write)-token/([^/]+)")
    def xet_token(self, name, scope, revision):
        self.repo(name, write=scope == "xet-write", content=scope == "xet-read")
        token, expiry = self.store.xet.token(scope)
        url = self.hub.storage_url
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": expiry}
        self.reply(200, {"casUrl": url, "accessToken": token, "exp": expiry}, headers)

    def check_xet(self, *scopes):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        claim, _, signature = token.rpartition(":")
        scope, _, expiry = claim.partition(":")
        if scope not in scopes or signature != self.hub.sign(claim) or int(expiry) < time.time():
            raise HubError(401, "Bad or expired Xet token")

    @route("GET POST", r"/v2/.*|/v1/(?:chunks|xorb-grants|telemetry)(?:/.*)?", "storage")
    def xet_unknown(self):
        # The client then takes version 1, uploads itself, and looks for no chunks that are there already.
        raise HubError(404, "not found")

    @route("POST", r"/v1/xorbs/[^/]+/([0-9a-f]{64})", "storage")
    def xet_xorb(self, name):
        self.check_xet("xet-write")
        data = self.body()
        new = name not in self.store.xet.xorbs
        self.store.xet.xorbs[name] = data
        self.reply(200, {"was_inserted": new})

    @route("POST", r"/v1/shards", "storage")
    def xet_shard(self):
        self.check_xet("xet-write")
        files = parse_shard(self.body())
        if any(term[0] not in self.store.xet.xorbs for file in files.values() for term in file["terms"]):
            raise HubError(400, "shard names a xorb that was not uploaded")
        self.store.xet.add(files)
        self.reply(200, {"result": 1})

    @route("GET", r"/v1/reconstructions/([0-9a-f]{64})", "storage")
    def xet_reconstruction(self, name):
        self.check_xet("xet-read", "xet-write")
        file = self.store.xet.files.get(name)
        if file is None:
            raise HubError(404, "not found")
        first, last = 0, file["size"] - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), last) if asked[2] else last
            if first >= file["size"]:
                raise HubError(416, "Range not satisfiable")
        terms, wanted, at, skipped = [], {}, 0, 0
        for xorb, length, start, end in file["terms"]:
            if at + length > first and at <= last:
                skipped = skipped if terms else first - at
                terms.append({"hash": xorb, "unpacked_length": length, "range": {"start": start, "end": end}})
                wanted.setdefault(xorb, []).append((start, end))
            at += length
        fetched = {xorb: self.xorb_ranges(xorb, ranges) for xorb, ranges in wanted.items()}
        self.reply(200, {"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetched})

    def xorb_ranges(self, xorb, ranges):
        """Where to have chunks from. Ranges that overlap are one, else the client takes the wrong of them."""
        merged, offsets = [], chunk_offsets(self.store.xet.xorbs[xorb])
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        url = self.hub.signed("GET", xorb, "xorb")
        return [
            {
                "range": {"start": start, "end": end},
                "url": url,
                "url_range": {"start": offsets[start], "end": offsets[end] - 1},
            }
            for start, end in merged
        ]

    @route("GET", "/xorb/([0-9a-f]{64})", "storage")
    def xet_download(self, name):
        self.check_signature("GET", name)
        path = self.store.root / "large" / f"{name}.xorb"
        self.store.write(path, self.store.xet.xorbs[name])
        self.reply(file=path)
