"""Moving what an encoder needs to its device, and nothing else."""

from mmcache.transfer.inputs import EncoderBatch, Transfer, TransferLookup, encoder_inputs

__all__ = ["EncoderBatch", "Transfer", "TransferLookup", "encoder_inputs"]
