"""The yardstick: fake engines and a load generator in C, so that what is measured is the proxy between them."""
