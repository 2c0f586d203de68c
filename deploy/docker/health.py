"""Is the process in this container well? For HEALTHCHECK: exit status 0 or 1, and one line that says why.

health.py http PORT      a daemon whose loop answers for its metrics on 127.0.0.1:PORT
health.py member PATH    an etcd behind the unix socket PATH that knows a leader, so is part of a majority
"""

import http.client
import socket
import sys

TIMEOUT_S = 4.0


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def main() -> int:
    kind, where = sys.argv[1:]
    if kind == "member":
        connection: http.client.HTTPConnection = UnixConnection(where)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", int(where), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health" if kind == "member" else "/metrics")
        answer = connection.getresponse()
        content = answer.read(65_536).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        sys.stdout.write(f"no answer: {error}\n")
        return 1
    if answer.status != 200:
        sys.stdout.write(f"status {answer.status}: {content[:200]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
