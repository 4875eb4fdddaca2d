"""A line through what was observed lately: seconds as a function of an amount."""

from __future__ import annotations

#: What an observation's weight is after one more.
_FADING = 0.98


class LinearFit:
    """seconds = fixed + slope * amount, neither below 0, by least squares with fading weights."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._amount = 0.0
        self._seconds = 0.0
        self._amount_sq = 0.0
        self._product = 0.0
        self.num_observations = 0

    def observe(self, amount: float, seconds: float) -> None:
        self.num_observations += 1
        self._weight = self._weight * _FADING + 1.0
        self._amount = self._amount * _FADING + amount
        self._seconds = self._seconds * _FADING + seconds
        self._amount_sq = self._amount_sq * _FADING + amount * amount
        self._product = self._product * _FADING + amount * seconds

    @property
    def rate(self) -> float:
        """Seconds per unit of amount if all time is put down to the amount: the most that `slope`
        can be."""
        return self._seconds / self._amount if self._amount else 0.0

    @property
    def slope(self) -> float:
        """Seconds per unit of amount. Without a spread of amounts, `rate`."""
        if not self._weight:
            return 0.0
        spread = self._amount_sq - self._amount**2 / self._weight
        if spread <= 1e-9 * self._amount_sq:
            return self.rate
        slope = (self._product - self._amount * self._seconds / self._weight) / spread
        return min(max(slope, 0.0), self.rate)

    @property
    def fixed(self) -> float:
        """Seconds of an amount of 0."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._seconds - self.slope * self._amount) / self._weight)

    def predict(self, amount: float) -> float:
        return self.fixed + self.slope * amount
