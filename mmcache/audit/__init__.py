"""Proving where fields belong, by running what consumes them on a simulated device.

`audit(encoder, batch, configs)` is for an engine author's own tests (`Auditor` for several configs of one encoder); the
command `mmcache audit` runs the real encoder path of a model of transformers.
"""

from mmcache.audit.command import add_audit_command
from mmcache.audit.consumers import Subject, audit_model, load_subject
from mmcache.audit.observe import Use
from mmcache.audit.report import AuditReport, FieldReport, Verdict
from mmcache.audit.verdicts import Auditor, audit

__all__ = [
    "AuditReport",
    "Auditor",
    "FieldReport",
    "Subject",
    "Use",
    "Verdict",
    "add_audit_command",
    "audit",
    "audit_model",
    "load_subject",
]
