"""Stages 1 and 2 under `torch_autocast`: weights, gradients and buckets in fp32, one bucket for each dtype that is sent (stage_1_and_2.py, 0.19.8).

Linear and convolution layers' gradients are sent in the autocast dtype, all others' in fp32 (runtime/torch_autocast.py, `init_autocast_params`).
"""

from __future__ import annotations

from explorer.estimator.rules.base import Job
from explorer.estimator.rules.stage12 import Bucket, Stage12
from explorer.estimator.stream import Writer


class Stage12Autocast(Stage12):
    """The first bucket is sent in 16 bit, the second in fp32; each only where some parameter goes there."""

    def __init__(self, job: Job, writer: Writer) -> None:
        super().__init__(job, writer)
        kinds = sorted({i not in job.sent_in_16_bit for i in self.trainable})
        self.by_kind = {fp32: Bucket() for fp32 in kinds}
        self.buckets = list(self.by_kind.values())

    def bucket_of(self, parameter: int) -> Bucket:
        return self.by_kind[parameter not in self.job.sent_in_16_bit]

    def _reduce(self, bucket: Bucket) -> None:
        w = self.writer
        copy = w.allocate(bucket.elements * self.gradient_bytes, "temporary", "reduce copy", stream=self.side) if self._copies(bucket) else 0
        if bucket is self.by_kind.get(False):
            w.transient(bucket.elements * 2, "16-bit copy for the reduction", self.side)
        w.free(copy)
