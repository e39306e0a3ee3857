"""verl's PPO loss, with the rollout/trainer gap measured beside it.

Contract: `ppo_loss_with_gap` returns verl's own loss unchanged; the metrics gain `quads/<name>` for every name of
quads.trainer.gap. The log-probs are those of the forward pass that is about to be differentiated, so with one update
per batch the gap is that of the weights which produced the rollout. Differs from a registered policy loss in that it
sees the rollout log-probs whichever log-probs are the old ones, and may aggregate a maximum as a maximum.
"""

from __future__ import annotations

from typing import Any

from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from quads.trainer.gap import gap_metrics


def ppo_loss_with_gap(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """verl's ppo_loss(config, model_output, data) and the gap metrics. Raises KeyError without rollout log-probs."""
    if "rollout_log_probs" not in data:
        raise KeyError("rollout_log_probs is not in the batch: set actor_rollout_ref.rollout.calculate_log_probs=True")
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    trainer = no_padding_2_padding(model_output["log_probs"], data)
    padded = data.select("response_mask", "rollout_log_probs").to_padded_tensor()
    gap = gap_metrics(
        trainer.detach(),
        padded["rollout_log_probs"],
        padded["response_mask"],
        config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
    )
    for name, value in gap.items():
        how = AggregationType.MAX if name == "gap_max" else AggregationType.MEAN
        metrics[f"quads/{name}"] = Metric(value=value, aggregation=how)
    return loss, metrics
