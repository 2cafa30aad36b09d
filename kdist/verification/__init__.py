"""`kdist.verify`: is a step over the mesh what one device computes? See docs/verify.md."""

from kdist.verification.report import Verification, VerificationError
from kdist.verification.tolerance import Difference
from kdist.verification.verify import verify

__all__ = ["Difference", "Verification", "VerificationError", "verify"]
