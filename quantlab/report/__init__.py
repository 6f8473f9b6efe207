"""Records -> figures, tables, one self-contained HTML page.  Imports no torch."""

from quantlab.report.figures import drift_overview
from quantlab.report.load import Collection, load_collection
from quantlab.report.page import render, write_report
from quantlab.report.tables import tidy_table

__all__ = ["Collection", "drift_overview", "load_collection", "render", "tidy_table", "write_report"]
