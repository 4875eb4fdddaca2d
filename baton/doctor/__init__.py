"""Checks of a machine before serving: each reports a finding and a fix."""

from baton.doctor.finding import Finding, Level
from baton.doctor.run import DoctorRequest, examine

__all__ = ["DoctorRequest", "Finding", "Level", "examine"]
