// As much of CUDA's driver as `taskgraph/device/virtual.py` asks for, on memory of the host: in place of libcuda.
//
// It refuses what the driver refuses: sizes that are no multiple of the granularity, handles and addresses that are not
// there, to map where nothing is reserved, to free what is mapped. `live` says how much of all that is left.

#include <cstdint>
#include <map>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr std::size_t GRAIN = 2 << 20;
constexpr std::size_t MOST = std::size_t(1) << 30;
constexpr int OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801;

struct Reserved {
    std::size_t size;
    bool mapped;
};

std::map<std::uint64_t, int> handles;
std::map<std::uint64_t, Reserved> addresses;
std::uint64_t last;
int failing;  // the next calls of cuMemSetAccess fail

struct Location {
    int type, id;
};

struct Properties {
    int type, handle_types;
    Location location;
    void* windows;
    unsigned char flags[8];
};

struct Access {
    Location location;
    int flags;
};

bool right(const Properties* of) {
    static_assert(sizeof(Properties) == 32);
    return of->type == 1 && of->handle_types == 1 && of->location.type == 1 && of->location.id == 0 && !of->windows;
}

Reserved* reserved(std::uint64_t at, std::size_t size) {
    const auto found = addresses.find(at);
    return found == addresses.end() || found->second.size != size ? nullptr : &found->second;
}

}  // namespace

extern "C" {

int live() {
    return static_cast<int>(handles.size() + addresses.size());
}

void fail(int calls) {
    failing = calls;
}

int cuMemGetAllocationGranularity(std::size_t* grain, const Properties* of, int option) {
    if (!right(of) || option != 0) return INVALID_VALUE;
    *grain = GRAIN;
    return OK;
}

int cuMemCreate(std::uint64_t* handle, std::size_t size, const Properties* of, std::uint64_t flags) {
    if (!right(of) || flags || !size || size % GRAIN) return INVALID_VALUE;
    if (size > MOST) return OUT_OF_MEMORY;
    const int fd = memfd_create("device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size))) return OUT_OF_MEMORY;
    handles[*handle = ++last] = fd;
    return OK;
}

int cuMemAddressReserve(std::uint64_t* at, std::size_t size, std::size_t alignment, std::uint64_t wish, std::uint64_t flags) {
    if (flags || wish || alignment || !size || size % GRAIN) return INVALID_VALUE;
    void* const found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    addresses[*at = reinterpret_cast<std::uint64_t>(found)] = {size, false};
    return OK;
}

int cuMemMap(std::uint64_t at, std::size_t size, std::size_t offset, std::uint64_t handle, std::uint64_t flags) {
    Reserved* const where = reserved(at, size);
    const auto found = handles.find(handle);
    struct stat status;
    if (!where || where->mapped || flags || offset || found == handles.end() || fstat(found->second, &status) ||
        status.st_size != static_cast<off_t>(size)) {
        return INVALID_VALUE;
    }
    if (mmap(reinterpret_cast<void*>(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second, 0) == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    where->mapped = true;
    return OK;
}

int cuMemSetAccess(std::uint64_t at, std::size_t size, const Access* access, std::size_t count) {
    const Reserved* const where = reserved(at, size);
    if (!where || !where->mapped || count != 1 || access->location.type != 1 || access->location.id != 0) {
        return INVALID_VALUE;
    }
    if (failing && failing--) return NOT_SUPPORTED;
    const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags == 1 ? PROT_READ : -1;
    if (protection < 0) return INVALID_VALUE;
    return mprotect(reinterpret_cast<void*>(at), size, protection) ? INVALID_VALUE : OK;
}

int cuMemExportToShareableHandle(int* fd, std::uint64_t handle, int type, std::uint64_t flags) {
    const auto found = handles.find(handle);
    if (type != 1 || flags || found == handles.end()) return INVALID_VALUE;
    *fd = dup(found->second);
    return *fd < 0 ? OUT_OF_MEMORY : OK;
}

int cuMemImportFromShareableHandle(std::uint64_t* handle, void* fd, int type) {
    const int own = dup(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)));
    if (type != 1 || own < 0) return INVALID_VALUE;
    handles[*handle = ++last] = own;
    return OK;
}

int cuMemUnmap(std::uint64_t at, std::size_t size) {
    Reserved* const where = reserved(at, size);
    if (!where || !where->mapped) return INVALID_VALUE;
    mmap(reinterpret_cast<void*>(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    where->mapped = false;
    return OK;
}

int cuMemAddressFree(std::uint64_t at, std::size_t size) {
    const Reserved* const where = reserved(at, size);
    if (!where || where->mapped) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(at), size);
    addresses.erase(at);
    return OK;
}

int cuMemRelease(std::uint64_t handle) {
    const auto found = handles.find(handle);
    if (found == handles.end()) return INVALID_VALUE;
    close(found->second);
    handles.erase(found);
    return OK;
}

}  // extern "C"
