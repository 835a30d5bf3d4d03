"""Moving what an encoder needs to its device, and nothing else."""

from mmcache.transfer.inputs import EncoderBatch, Transfer, encoder_inputs
from mmcache.transfer.lookups import TransferLookup

__all__ = ["EncoderBatch", "Transfer", "TransferLookup", "encoder_inputs"]
