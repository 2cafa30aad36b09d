"""Models as files that serve without kdist, imported as `kdist.export`."""

from kdist.export.saved_model import saved_model
from kdist.export.signature import Signature

__all__ = ["Signature", "saved_model"]
