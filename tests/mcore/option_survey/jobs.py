"""The option survey: all jobs with Megatron's less common options."""

from __future__ import annotations

from tests.mcore.option_survey.jobs_models import HYBRIDS, LAYERS, MIXTURES, VOCABULARIES
from tests.mcore.option_survey.jobs_storage import CHECKPOINTS, DATASETS, REPLICAS
from tests.mcore.option_survey.jobs_training import LOOP, PRECISION, RATES

JOBS = {
    "loop": LOOP,
    "rates": RATES,
    "precision": PRECISION,
    "layers": LAYERS,
    "vocabularies": VOCABULARIES,
    "experts": MIXTURES,
    "hybrid models": HYBRIDS,
    "replicas": REPLICAS,
    "data": DATASETS,
    "checkpoints": CHECKPOINTS,
}
"""By what they are about."""
