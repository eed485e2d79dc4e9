"""Every decision, made from integers before any tensor moves. Imports neither torch nor torch.distributed."""

from longweave.plan.layout import Layout
from longweave.plan.mask import Mask, Slice
from longweave.plan.ranges import Span
from longweave.plan.routing import Route, route
from longweave.plan.schedule import Plan, make_plan

__all__ = ["Layout", "Mask", "Plan", "Route", "Slice", "Span", "make_plan", "route"]
