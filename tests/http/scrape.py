"""What `/metrics` says."""

from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """One scrape of `/metrics`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples that carry these labels; 0 where there is none."""
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by one label."""
        sums: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name:
                sums[sample.labels[label]] = sums.get(sample.labels[label], 0.0) + sample.value
        return sums
