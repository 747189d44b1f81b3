// PyTorch asks this for the number of GPUs; `fake_gpus` says it. Loaded before PyTorch's own.
static int number = 0;
extern "C" void fake_gpus(int count) { number = count; }
namespace c10::cuda {
signed char device_count() noexcept { return static_cast<signed char>(number); }
signed char device_count_ensure_non_zero() { return 1; }
}  // namespace c10::cuda
