"""C code for kernels in threads."""

THREADS = r"""
#include <algorithm>
#include <atomic>

namespace pytensor_ml_threads {

// As on Numba: what one thread reads and writes in the time that another needs to begin, and how
// finely its work is divided, since a processor may be taken from it.
const npy_intp LEAST_BYTES = 1 << 16, PARTS_OF_A_THREAD = 4;

static void (*run_parts)(void (*)(void*, npy_intp), void*, npy_intp) = NULL;
static npy_intp (*count_threads)() = NULL;

// Finds the threads, or sets an error. A kernel does so first: a part of one lacks Python's lock.
inline bool find_threads() {
    if (count_threads) return true;
    PyObject* module = PyImport_ImportModule("pytensor_ml.dispatch.threads");
    PyObject* run = module ? PyObject_GetAttrString(module, "RUN") : NULL;
    PyObject* count = run ? PyObject_GetAttrString(module, "COUNT_THREADS") : NULL;
    if (count) {
        run_parts = (void (*)(void (*)(void*, npy_intp), void*, npy_intp))PyLong_AsVoidPtr(run);
        count_threads = (npy_intp (*)())PyLong_AsVoidPtr(count);
    }
    Py_XDECREF(count);
    Py_XDECREF(run);
    Py_XDECREF(module);
    return count_threads != NULL;
}

// In how many parts to do items that read and write so many bytes in all.
inline npy_intp count_parts(npy_intp n_items, npy_intp n_bytes) {
    const npy_intp n_threads = count_threads();
    if (n_threads == 1) return 1;
    return std::max(std::min({n_threads * PARTS_OF_A_THREAD, n_items, n_bytes / LEAST_BYTES}),
                    npy_intp(1));
}

template <typename Work>
struct Job {
    const Work& work;
    const npy_intp n_items, n_parts;
    std::atomic<bool> has_thrown;

    Job(const Work& work, npy_intp n_items, npy_intp n_parts)
        : work(work), n_items(n_items), n_parts(n_parts), has_thrown(false) {}

    static void do_part(void* address, npy_intp part) {
        Job& job = *(Job*)address;
        try {
            job.work(job.n_items * part / job.n_parts, job.n_items * (part + 1) / job.n_parts);
        } catch (...) {
            job.has_thrown = true;
        }
    }
};

// Does `work(first, stop)` for parts of the items, in any order. False with an error if one threw,
// which is taken for a lack of memory. Work must not use Python; and what is called in a part of
// another's must not throw, as the error would use it.
template <typename Work>
bool in_threads(npy_intp n_items, npy_intp n_parts, const Work& work) {
    Job<Work> job(work, n_items, n_parts);
    run_parts(Job<Work>::do_part, &job, n_parts);
    if (job.has_thrown)
        PyErr_SetString(PyExc_MemoryError,
                        "A kernel found no memory for what it computes on the way.");
    return !job.has_thrown;
}

}
"""
