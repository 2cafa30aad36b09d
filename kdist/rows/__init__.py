"""Where rows of a batch meet: an analysis of traced graphs.

kdist computes each replica's rows by themselves. That equals one device where every output row
depends on its own row alone, and where losses are means, or sums, over rows. This package tells by
following the batch's dim through the graph of a function: `values` says what may be known about a
tensor, `elementwise`, `shaping`, `reductions`, `contractions` and `control` hold the rules of
operations, `interpreter` walks, `study` is the entry.
"""

from kdist.rows.study import NotStudied, RowStudy, study
from kdist.rows.values import Mixing, RowDependence

__all__ = ["RowDependence", "Mixing", "NotStudied", "RowStudy", "study"]
