"""Keep inference engines bit-identical to a trainer while sending about one percent of the bytes."""
