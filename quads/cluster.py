"""Stage wrapper: run a command on a Ray cluster that spans the nodes of this Slurm allocation.

    python -m quads.cluster --gpus-per-node 8 --logs DIR -- python -m quads.train ...

Contract: exit code of the command; 1 with a message when the cluster did not come up or lost a node. The command finds
the cluster in QUADS_RAY_ADDRESS (quads.integrations.verl.main). Everything else: quads.integrations.ray_cluster.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from quads.integrations.ray_cluster import Cluster, ClusterError
from quads.lifeline import watch_parents

log = logging.getLogger("quads.cluster")


def _terminate(signum: int, frame: Any) -> None:
    """A preempted or cancelled job unwinds like an exception, so that no node keeps running."""
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Start the cluster, run the command, end the cluster."""
    parser = argparse.ArgumentParser(prog="python -m quads.cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus-per-node", type=int, required=True, help="GPUs each node declares to Ray")
    parser.add_argument("--cpus-per-node", type=int, default=64, help="CPUs each node declares to Ray (%(default)s)")
    parser.add_argument(
        "--object-store", type=int, help="bytes of Ray's object store on a node (default: Ray's choice)"
    )
    parser.add_argument("--wait", type=float, default=300.0, help="seconds for all nodes to join (%(default)s)")
    parser.add_argument("--logs", type=Path, required=True, help="folder for one log per node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given; write it after --")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    watch_parents()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with Cluster(args.gpus_per_node, args.cpus_per_node, args.logs, args.object_store, args.wait) as cluster:
            return cluster.run(command)
    except ClusterError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
