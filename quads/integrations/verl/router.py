"""A request router for one replica, light enough to start in a second.

Contract: verl's RequestLoadBalancer protocol; every request goes to the only server. Loaded by the router YAML that
verl reads from `rollout.router_config_path`. Differs from verl's default router in what its process imports: the
default lives in a module that pulls verl and vLLM (about 30 s of a start-up on two cores), this one imports nothing.
"""

from __future__ import annotations

from typing import Any

ROUTER_CLASS = "quads.integrations.verl.router.OneReplicaRouter"


class OneReplicaRouter:
    """Hands out the single server it was built with."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        if len(servers) != 1:
            raise ValueError(
                f"OneReplicaRouter serves one replica, got {len(servers)}; use runtime.agent_loop: verl for more"
            )
        self._server_id, self._server = next(iter(servers.items()))

    def require_acquire_fields(self) -> list[str]:
        return []

    def require_release_fields(self) -> list[str]:
        return []

    def acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        return self._server_id, self._server

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass

    def add_servers(self, servers: dict[str, Any]) -> None:
        raise ValueError("OneReplicaRouter cannot grow; use runtime.agent_loop: verl")

    def remove_servers(self, server_ids: list[str]) -> None:
        raise ValueError("OneReplicaRouter cannot shrink; use runtime.agent_loop: verl")
