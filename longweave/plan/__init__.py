"""Every decision, made from integers before any tensor moves. Imports neither torch nor torch.distributed."""

from longweave.plan.cost import CPU, Machine, Shape
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask, Slice
from longweave.plan.ranges import Span
from longweave.plan.routing import Route, route
from longweave.plan.schedule import Plan, make_plan

__all__ = ["CPU", "Layout", "Machine", "Mask", "Plan", "Route", "Shape", "Slice", "Span", "make_plan", "route"]
