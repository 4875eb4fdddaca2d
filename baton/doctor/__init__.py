"""What a machine lacks to serve: each check says what it found and what to do."""

from baton.doctor.finding import Finding, Level
from baton.doctor.run import DoctorRequest, examine

__all__ = ["DoctorRequest", "Finding", "Level", "examine"]
