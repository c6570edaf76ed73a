"""Open Ray's dashboard in the browser, through a port of this machine, until Ctrl-C."""

import argparse
import time
import webbrowser

from ops import kube, run_env, runs, terminal
from ops.forward import Forward
from ops.terminal import UserError


def main() -> int:
    """Forward the port until Ctrl-C; then end what was started, and exit with 0."""
    parser = argparse.ArgumentParser(prog="make dashboard", description=__doc__)
    parser.add_argument("--no-open", action="store_true", help="only print the address")
    parser.add_argument("--port", type=int, default=0, help="on this machine (default: a free one)")
    arguments = parser.parse_args()
    cluster = kube.connect(run_env.load())
    name = runs.current(cluster)
    there = cluster.cluster(name)
    if there is None:
        raise UserError(f"there is no RayCluster {name}: make cluster")
    source = kube.token_source(there)
    try:
        with Forward(cluster, name, arguments.port) as forward:
            lines = [f"Ray's dashboard: {forward.address} (only from this machine; Ctrl-C ends it)"]
            if source:
                command = " ".join(cluster.command("get", "secret", source[0]))
                lines.append(
                    f"It asks for a token: {command} --output=jsonpath='{{.data.{source[1]}}}' | base64 --decode"
                )
            terminal.console.print("\n".join(lines), markup=False)
            if not arguments.no_open:
                webbrowser.open(forward.address)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        terminal.console.print("The dashboard's port is closed.")
        return 0


if __name__ == "__main__":
    terminal.run(main)
