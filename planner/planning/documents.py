"""The JSON documents of results: one place for the names other programs read."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from planner.cost.memory_traits import traits_of
from planner.cost.software import USUAL, software_named
from planner.cost.software_file import shipped_software, shipped_stacks

if TYPE_CHECKING:
    from planner.planning.goodput import PlanGoodput
    from planner.planning.planning import Candidate, Prediction, SearchResult
    from planner.planning.stragglers import StraggledStep
    from planner.plans.plan import Certificate, Plan
    from simulator.calibration.fit_profiles import ProfileFit
    from simulator.hardware import Hardware

Document = dict[str, Any]


def prediction_document(prediction: Prediction) -> Document:
    """The prediction of one step; ``tokens_per_s`` is null for networks that read no tokens.

    ``objective_s`` is the step time that the search minimised, null where nothing was searched, ``differing_term``
    the part of the breakdown that tells it from the simulated one, null where both agree within 5 %.
    """
    from planner.planning.rescoring import differing_term

    return {
        "step_time_s": prediction.step_time_s,
        "objective_s": sum(prediction.analytic.values()) if prediction.analytic else None,
        "differing_term": differing_term(prediction.analytic, prediction) or None,
        "analytic_breakdown": dict(prediction.analytic),
        "interval_s": list(prediction.interval_s),
        "label": str(prediction.label),
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "device_memory_bytes": prediction.device_memory_bytes,
        "p_fits": prediction.p_fits,
        "host_memory_bytes": prediction.host_memory_bytes,
        "software": prediction.software or None,
        "memory_figures": {name: round(size) for name, size in prediction.memory_figures.items()} or None,
        "memory_at_peak": {str(kind): size for kind, size in prediction.memory_at_peak.items()},
        "breakdown": dict(prediction.breakdown),
        **({"start_s": prediction.start_s} if prediction.start_s else {}),
    }


def plan_document(plan: Plan, hardware: Hardware) -> Document:
    """The choices of a plan, with the topology level that each mesh axis crosses."""
    from simulator.topology import level_of_axis

    mesh = plan.mesh
    return {
        "devices": plan.devices,
        "mesh": [
            {
                "axis": axis.name,
                "size": axis.size,
                "level": level_of_axis(hardware, axis.size, mesh.stride(index)),
            }
            for index, axis in enumerate(mesh.axes)
        ],
        "dp": plan.degree("data") * plan.degree("expert"),
        "tp": plan.degree("tensor"),
        "pp": plan.pipeline,
        "vpp": plan.virtual,
        "cp": plan.degree("context"),
        "ep": plan.expert_ranks,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "copies": plan.copies,
        "sequence_parallel": plan.sequence_parallel,
        "tensor_overlap": plan.tensor_overlap,
        "expert_overlap": plan.expert_overlap,
        "sent_once": plan.sent_once,
        "recompute": plan.recomputation,
        "recompute_messages": all(part.messages for part in plan.recompute_ranges),
        "optimizer_sharding": plan.optimizer_sharding,
        "shard_size": plan.shard_size,
        "offload_optimizer": plan.offload_optimizer,
        "offload_to": plan.offload_to if plan.offload_optimizer else None,
        "offload_parameters": plan.offload_parameters,
        "host_embeddings": plan.host_embeddings,
        "offload_activations": bool(plan.offload_ranges),
        "context_algorithm": plan.context_algorithm,
        "bucket_bytes": plan.bucket_bytes,
        "sharding_threshold_bytes": plan.sharding_threshold_bytes,
        "schedule": plan.schedule,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "software": plan.software or None,
        "attention": plan.attention or None,
        "norms": plan.norms or None,
    }


def search_document(result: SearchResult, mode: str, certificate: Certificate | None) -> Document:
    """What the search did and proved; the numbers of a certificate are null where there is no plan."""
    return {
        "mode": mode,
        "elapsed_s": result.elapsed_s,
        "simulation_s": result.simulation_s,
        "capture_s": result.capture_s,
        "timings": dict(result.timings),
        "objective_s": certificate and certificate.objective_s,
        "lower_bound_s": certificate and certificate.lower_bound_s,
        "gap": certificate and certificate.gap,
        "elimination_width": certificate and certificate.elimination_width,
        "operators": certificate and certificate.operators,
        "distinct_blocks": certificate and certificate.distinct_blocks,
        "states": certificate and certificate.states,
        "states_left": certificate and certificate.states_left,
        "largest_table": certificate and certificate.largest_table,
        "configurations": certificate and certificate.configurations,
        "partitions": certificate and certificate.partitions,
    }


def candidate_document(candidate: Candidate, result: SearchResult, hardware: Hardware) -> Document:
    """One plan of a result."""
    plan = candidate.plan
    return {
        "status": str(plan.certificate.status),
        "search": search_document(result, plan.search_mode, plan.certificate),
        "prediction": prediction_document(candidate.prediction) | {"software": plan.software or USUAL},
        "plan": plan_document(plan, hardware),
        "reason": candidate.reason,
    }


def result_document(result: SearchResult, hardware: Hardware, mode: str, strategy_file: str | None) -> Document:
    """The document of ``meshwright plan --json``."""
    if result.candidates:
        best, *others = result.candidates
        document = {**candidate_document(best, result, hardware), "status": str(result.status)}
        document["alternatives"] = [candidate_document(other, result, hardware) for other in others]
    else:
        document = {
            "status": str(result.status),
            "search": search_document(result, mode, None),
            "prediction": None,
            "plan": None,
            "reason": result.infeasible,
            "alternatives": [],
        }
    prices = result.shadow_prices
    document["pin_costs"] = [
        {"pin": pin, "cost_s": seconds, "without": other} for pin, seconds, other in result.pin_costs
    ]
    document["shadow_prices"] = prices and {
        "memory_gib_s": prices.memory_gib_s,
        "bandwidth_10_percent_s": dict(prices.links_s),
    }
    return {**document, "messages": list(result.messages), "strategy_file": strategy_file}


def fitted_document(fit: ProfileFit, path: str) -> Document:
    """Fits of one profile: rows and relative errors of each, now and with the numbers that it replaces."""
    fits = []
    for part in fit.fits:
        median, tail = part.errors
        before = part.errors_before
        fits.append(
            {
                "name": part.name,
                "rows": len(part.ratios),
                "of": part.what,
                "numbers": dict(part.numbers),
                "median_error": median,
                "p90_error": tail,
                "median_error_before": before[0] if before else None,
                "p90_error_before": before[1] if before else None,
            }
        )
    return {"profile": fit.profile, "file": path, "fields": len(fit.fields), "fits": fits}


def profile_document(hardware: Hardware) -> Document:
    """What a profile says in short."""
    return {
        "name": hardware.name,
        "hash": hardware.hash,
        "description": hardware.description,
        "device": hardware.device_name,
        "device_memory_bytes": hardware.device_memory_bytes,
        "devices_per_node": hardware.devices_per_node,
        "max_devices": hardware.max_devices,
        "default_precision": hardware.default_precision,
        "label": hardware.uncertainty.label,
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s,
                "latency_s": level.latency_s,
            }
            for level in hardware.levels
        ],
    }


def straggler_document(step: StraggledStep, step_time_s: float) -> Document:
    """A step with slow ranks and links beside the one without."""
    return {
        "step_time_s": step.step_time_s,
        "slowdown": step.step_time_s / step_time_s if step_time_s else 1.0,
        "largest_factor": step.largest_factor,
        "slow_ranks": [{"rank": rank, "factor": factor} for rank, factor in step.slow_ranks.items()],
        "slow_links": dict(step.slow_links),
        "slow_link_ranks": dict(step.link_ranks),
    }


def goodput_document(goodput: PlanGoodput, prediction: Prediction) -> Document:
    """What failures leave of the time; rates are those of the whole job, lost time included."""
    import numpy as np

    expected, simulated = goodput.expected, goodput.simulated
    low, high = np.quantile(simulated.useful, (0.1, 0.9)).tolist()
    tokens = prediction.tokens_per_s
    return {
        "goodput": expected.useful,
        "checkpoint": expected.checkpoint,
        "repeated": expected.repeated,
        "restart": expected.restart,
        "interval_s": expected.interval_s,
        "interval_steps": goodput.interval_steps,
        "young_interval_s": goodput.young_interval_s,
        "daly_interval_s": goodput.daly_interval_s,
        "job_mtbf_s": goodput.job_mtbf_s,
        "device_mtbf_s": goodput.reliability.device_mtbf_s,
        "restart_s": goodput.restart_s,
        "checkpoint_bytes_per_rank": goodput.checkpoint_bytes.written,
        "loaded_bytes_per_rank": goodput.checkpoint_bytes.loaded,
        "checkpoint_blocking_s": goodput.checkpoint.blocking_s,
        "checkpoint_background_s": goodput.checkpoint.background_s,
        "checkpoint_load_s": goodput.checkpoint.load_s,
        "samples_per_s": prediction.samples_per_s * expected.useful,
        "tokens_per_s": None if tokens is None else tokens * expected.useful,
        "simulated": {
            "runs": len(simulated.useful),
            "days": goodput.days,
            "goodput": simulated.mean.useful,
            "p10": low,
            "p90": high,
            "failures": float(simulated.failures.mean()),
        },
    }


def software_names() -> list[str]:
    """Names that ``--software`` takes, in the order of the file."""
    return list(shipped_stacks().software)


def software_document(name: str) -> Document:
    """What software is, and on which families of devices it is usual for what.

    Raises
    ------
    InputError
        The software is not known.
    """
    known = software_named(name)
    kinds = ("language", "sharded", "other")
    usual = {
        family: [kind for kind in kinds if getattr(one, kind) == name] for family, one in shipped_stacks().usual.items()
    }
    return {
        "name": name,
        "title": known.title,
        "stack": str(known.stack),
        "usual_for": {family: found for family, found in usual.items() if found},
        "fusion": known.fusion,
        "attention": dict(known.attention),
        "overlaps": known.overlaps,
        "source": known.source,
    }


def software_rows(name: str) -> list[dict[str, str]]:
    """Every number of software with its source: habits of its users, coefficients of its stack, bytes of memory."""
    known, file = software_named(name), shipped_software()
    stack = str(known.stack)
    said = [(field, getattr(known, field)) for field in type(known).model_fields if field not in ("title", "source")]
    rows = [(field, value, known.source) for field, value in said]
    fitted = file.coefficients.stacks.get(stack, {})
    rows += [(f"stacks.{stack}.{field}", value, file.sources.get(stack, "")) for field, value in fitted.items()]
    traits = traits_of(known.stack)
    memory = "read: planner/cost/memory_traits.py"
    rows += [(f"memory.{field.name}", getattr(traits, field.name), memory) for field in fields(traits)]
    return [{"field": field, "value": str(value), "source": source} for field, value, source in rows]
