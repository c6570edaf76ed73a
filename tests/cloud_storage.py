"""A Cloud Storage emulator that speaks the JSON API, and the environment in which a command uses it without a login."""

import urllib.parse
import urllib.request

from gcp_storage_emulator import server


def environment(emulator: "Emulator | None" = None) -> dict[str, str]:
    """Return an environment without any Google login; with an emulator, its storage needs none."""
    plain = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "160", "GCE_METADATA_HOST": "127.0.0.1:9"}
    return plain | ({"STORAGE_EMULATOR_HOST": emulator.address} if emulator else {})


class Emulator:
    """A bucket in memory behind the JSON API, from `with Emulator(name) as bucket` to its end."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self._server = server.create_server("127.0.0.1", 0, in_memory=True)

    def __enter__(self) -> "Emulator":
        self._server.start()
        self.address = f"http://127.0.0.1:{self._server._api._httpd.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def make_bucket(self) -> None:
        self._post("/storage/v1/b?project=acme-tpu", f'{{"name": "{self.bucket}"}}'.encode(), "application/json")

    def put(self, name: str, size: int) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        self._post(f"/upload/storage/v1/b/{self.bucket}/o?{query}", b"x" * size, "application/octet-stream")

    def _post(self, path: str, body: bytes, kind: str) -> None:
        request = urllib.request.Request(self.address + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=10):
            pass
