"""Reads mixtures of experts from config.json."""

from __future__ import annotations

from baton.errors import UnsupportedModel
from engine.families.config import ExpertsConfig
from engine.families.fields import Settings


def in_all_layers(settings: Settings) -> ExpertsConfig:
    """Experts of the MLP's size in all layers; weights of the chosen ones add up to 1."""
    return ExpertsConfig(
        (True,) * settings["num_hidden_layers"],
        settings["num_local_experts"],
        settings["num_experts_per_tok"],
        settings["intermediate_size"],
    )


def in_groups(settings: Settings) -> ExpertsConfig:
    """Grouped experts chosen by sigmoid, and shared experts, after the leading dense layers."""
    first, size = settings["first_k_dense_replace"] or 0, settings["moe_intermediate_size"]
    return ExpertsConfig(
        tuple(layer >= first for layer in range(settings["num_hidden_layers"])),
        settings["n_routed_experts"],
        settings["num_experts_per_tok"],
        size,
        is_sigmoid=True,
        is_normalised=bool(settings["norm_topk_prob"]),
        scale=settings["routed_scaling_factor"],
        num_groups=settings["n_group"] or 1,
        num_chosen_groups=settings["topk_group"] or 1,
        shared_size=size * settings["n_shared_experts"],
    )


def check_experts(found: ExpertsConfig) -> None:
    """Raise UnsupportedModel if the numbers of experts and groups do not fit each other."""
    if not 1 <= found.num_chosen <= found.num_experts or found.num_experts % found.num_groups:
        raise UnsupportedModel(
            f"{found.num_chosen} of {found.num_experts} experts in {found.num_groups} groups: "
            "the first must be 1 to the second, and that a multiple of the third"
        )
    group_size = found.num_experts // found.num_groups
    if not found.num_chosen <= found.num_chosen_groups * group_size <= found.num_experts:
        raise UnsupportedModel(
            f"{found.num_chosen} experts of {found.num_chosen_groups} of {found.num_groups} groups "
            f"of {group_size}: there must be so many"
        )
