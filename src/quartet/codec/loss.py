"""Messages of quartet.api.learner.v1's losses."""

from __future__ import annotations

from quartet.api.learner.v1 import learner_service_pb2
from quartet.api.learner.v1 import loss_pb2 as pb
from quartet.codec.check import at_least, finite, invalid
from quartet.codec.enums import (
    CORRECTION_GATING,
    CORRECTION_LEVEL,
    CORRECTION_MODE,
    KL_ESTIMATOR,
    LOSS_AGGREGATION,
    PAIRWISE_LOSS_TYPE,
    POLICY_LOSS_TYPE,
)
from quartet.types import (
    DpoLoss,
    KlLoss,
    Loss,
    MismatchCorrection,
    PairwiseLoss,
    PolicyLoss,
    SftLoss,
    ValueLoss,
)


def encode_mismatch_correction(correction: MismatchCorrection) -> pb.MismatchCorrection:
    """Encode the correction between sampler and learner."""
    return pb.MismatchCorrection(
        level=CORRECTION_LEVEL.encode(correction.level, "level"),
        mode=CORRECTION_MODE.encode(correction.mode, "mode"),
        gating=CORRECTION_GATING.encode(correction.gating, "gating"),
        threshold_low=correction.threshold_low,
        threshold_high=correction.threshold_high,
    )


def decode_mismatch_correction(
    message: pb.MismatchCorrection, field: str = "mismatch_correction"
) -> MismatchCorrection:
    """Decode the correction between sampler and learner."""
    at_least(message.threshold_low, message.threshold_high, f"{field}.threshold_high")
    return MismatchCorrection(
        level=CORRECTION_LEVEL.decode(message.level, f"{field}.level"),
        mode=CORRECTION_MODE.decode_or(message.mode, "mask", f"{field}.mode"),
        gating=CORRECTION_GATING.decode_or(message.gating, "ratio", f"{field}.gating"),
        threshold_low=message.threshold_low,
        threshold_high=message.threshold_high,
    )


def encode_kl_loss(loss: KlLoss) -> pb.KlLoss:
    """Encode KL as a term of the loss."""
    return pb.KlLoss(
        coef=loss.coef,
        estimator=KL_ESTIMATOR.encode(loss.estimator, "estimator"),
        unbiased_gradient=loss.unbiased_gradient,
        bound_all=loss.bound_all,
    )


def decode_kl_loss(message: pb.KlLoss, field: str = "kl_loss") -> KlLoss:
    """Decode KL as a term of the loss."""
    return KlLoss(
        coef=finite(message.coef, f"{field}.coef"),
        estimator=KL_ESTIMATOR.decode(message.estimator, f"{field}.estimator"),
        unbiased_gradient=message.unbiased_gradient,
        bound_all=message.bound_all,
    )


def encode_policy_loss(loss: PolicyLoss) -> pb.PolicyLoss:
    """Encode a policy loss."""
    correction = loss.mismatch_correction
    return pb.PolicyLoss(
        type=POLICY_LOSS_TYPE.encode(loss.type, "type"),
        eps_clip_low=loss.eps_clip_low,
        eps_clip_high=loss.eps_clip_high,
        dual_clip=loss.dual_clip,
        aggregation=LOSS_AGGREGATION.encode(loss.aggregation, "aggregation"),
        aggregation_length=loss.aggregation_length,
        entropy_coef=loss.entropy_coef,
        kl_loss=None if loss.kl_loss is None else encode_kl_loss(loss.kl_loss),
        aux_loss_coef=loss.aux_loss_coef,
        mismatch_correction=None if correction is None else encode_mismatch_correction(correction),
        temperature=loss.temperature,
    )


def decode_policy_loss(message: pb.PolicyLoss, field: str = "policy") -> PolicyLoss:
    """Decode a policy loss."""
    aggregation = LOSS_AGGREGATION.decode(message.aggregation, f"{field}.aggregation")
    if aggregation == "seq-mean-token-sum-norm":
        at_least(1, message.aggregation_length, f"{field}.aggregation_length")
    if not finite(message.temperature, f"{field}.temperature") > 0:
        raise invalid(
            f"{field}.temperature", message.temperature, f"is {message.temperature}, not above 0"
        )
    dual_clip = message.dual_clip if message.HasField("dual_clip") else None
    if dual_clip is not None and not dual_clip > 1:
        raise invalid(f"{field}.dual_clip", dual_clip, f"is {dual_clip}, not above 1")
    # UNSPECIFIED is documented as "no correction".
    corrected = message.HasField("mismatch_correction") and message.mismatch_correction.level != 0
    correction = None
    if corrected:
        correction = decode_mismatch_correction(
            message.mismatch_correction, f"{field}.mismatch_correction"
        )
    return PolicyLoss(
        type=POLICY_LOSS_TYPE.decode(message.type, f"{field}.type"),
        eps_clip_low=finite(message.eps_clip_low, f"{field}.eps_clip_low"),
        eps_clip_high=finite(message.eps_clip_high, f"{field}.eps_clip_high"),
        dual_clip=dual_clip,
        aggregation=aggregation,
        aggregation_length=message.aggregation_length,
        entropy_coef=message.entropy_coef if message.HasField("entropy_coef") else None,
        kl_loss=decode_kl_loss(message.kl_loss) if message.HasField("kl_loss") else None,
        aux_loss_coef=finite(message.aux_loss_coef, f"{field}.aux_loss_coef"),
        mismatch_correction=correction,
        temperature=message.temperature,
    )


def encode_value_loss(loss: ValueLoss) -> pb.ValueLoss:
    """Encode a value loss."""
    return pb.ValueLoss(
        value_clip=loss.value_clip,
        aggregation=LOSS_AGGREGATION.encode(loss.aggregation, "aggregation"),
        aux_loss_coef=loss.aux_loss_coef,
    )


def decode_value_loss(message: pb.ValueLoss, field: str = "value") -> ValueLoss:
    """Decode a value loss."""
    return ValueLoss(
        value_clip=message.value_clip if message.HasField("value_clip") else None,
        aggregation=LOSS_AGGREGATION.decode(message.aggregation, f"{field}.aggregation"),
        aux_loss_coef=finite(message.aux_loss_coef, f"{field}.aux_loss_coef"),
    )


def encode_sft_loss(loss: SftLoss) -> pb.SftLoss:
    """Encode a supervised loss."""
    return pb.SftLoss(aux_loss_coef=loss.aux_loss_coef)


def decode_sft_loss(message: pb.SftLoss, field: str = "sft") -> SftLoss:
    """Decode a supervised loss."""
    return SftLoss(aux_loss_coef=finite(message.aux_loss_coef, f"{field}.aux_loss_coef"))


def encode_pairwise_loss(loss: PairwiseLoss) -> pb.PairwiseLoss:
    """Encode a reward model's loss."""
    return pb.PairwiseLoss(
        type=PAIRWISE_LOSS_TYPE.encode(loss.type, "type"),
        compute_in_fp32=loss.compute_in_fp32,
        aux_loss_coef=loss.aux_loss_coef,
    )


def decode_pairwise_loss(message: pb.PairwiseLoss, field: str = "pairwise") -> PairwiseLoss:
    """Decode a reward model's loss."""
    return PairwiseLoss(
        type=PAIRWISE_LOSS_TYPE.decode(message.type, f"{field}.type"),
        compute_in_fp32=message.compute_in_fp32,
        aux_loss_coef=finite(message.aux_loss_coef, f"{field}.aux_loss_coef"),
    )


def encode_dpo_loss(loss: DpoLoss) -> pb.DpoLoss:
    """Encode a direct preference loss."""
    return pb.DpoLoss(
        beta=loss.beta,
        ipo=loss.ipo,
        ipo_sum=loss.ipo_sum,
        label_smoothing=loss.label_smoothing,
        nll_loss_coef=loss.nll_loss_coef,
        aux_loss_coef=loss.aux_loss_coef,
    )


def decode_dpo_loss(message: pb.DpoLoss, field: str = "dpo") -> DpoLoss:
    """Decode a direct preference loss."""
    return DpoLoss(
        beta=finite(message.beta, f"{field}.beta"),
        ipo=message.ipo,
        ipo_sum=message.ipo_sum,
        label_smoothing=finite(message.label_smoothing, f"{field}.label_smoothing"),
        nll_loss_coef=finite(message.nll_loss_coef, f"{field}.nll_loss_coef"),
        aux_loss_coef=finite(message.aux_loss_coef, f"{field}.aux_loss_coef"),
    )


def encode_loss(loss: Loss) -> learner_service_pb2.TrainHeader:
    """Encode any loss into a header that says nothing else."""
    match loss:
        case PolicyLoss():
            return learner_service_pb2.TrainHeader(policy=encode_policy_loss(loss))
        case ValueLoss():
            return learner_service_pb2.TrainHeader(value=encode_value_loss(loss))
        case SftLoss():
            return learner_service_pb2.TrainHeader(sft=encode_sft_loss(loss))
        case PairwiseLoss():
            return learner_service_pb2.TrainHeader(pairwise=encode_pairwise_loss(loss))
        case DpoLoss():
            return learner_service_pb2.TrainHeader(dpo=encode_dpo_loss(loss))


def decode_loss(message: learner_service_pb2.TrainHeader, field: str = "loss") -> Loss:
    """Decode the loss of a header."""
    match message.WhichOneof("loss"):
        case "policy":
            return decode_policy_loss(message.policy)
        case "value":
            return decode_value_loss(message.value)
        case "sft":
            return decode_sft_loss(message.sft)
        case "pairwise":
            return decode_pairwise_loss(message.pairwise)
        case "dpo":
            return decode_dpo_loss(message.dpo)
        case None:
            raise invalid(field, "", "is not set: a step needs one")
