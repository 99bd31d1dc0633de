// xxh3-128, seed 0, default secret, of every block of a buffer; from the XXH3 specification 0.1.1 (see digest.py). And
// the same in the pass that copies the buffer.
//
// A thread block digests one block of the buffer. XXH3 takes rounds of 1 KiB, and each ends with a scramble that the
// next one needs. But what a round adds to the accumulators depends on its data only, and its stripes add up in any
// order. So SUMMERS warps add up the rounds, ROUNDS_EACH of them at a time, and one more warp, the chain, does what is
// sequential: for each round in order, add its sum and scramble. They work on different halves of `sums`: while the
// chain takes one batch of rounds, the others make the next.
//
// No headers: NVRTC has none unless it is told where they are.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u64 PRIME32_1 = 0x9E3779B1U;
constexpr u64 PRIME32_2 = 0x85EBCA77U;
constexpr u64 PRIME32_3 = 0xC2B2AE3DU;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87ULL;
constexpr u64 PRIME64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr u64 PRIME64_3 = 0x165667B19E3779F9ULL;
constexpr u64 PRIME64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr u64 PRIME64_5 = 0x27D4EB2F165667C5ULL;
constexpr u64 PRIME_MX1 = 0x165667919E3779F9ULL;
constexpr u64 PRIME_MX2 = 0x9FB21C651E98DF25ULL;

constexpr u32 SECRET_BYTES = 192;
__constant__ __align__(8) u8 SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

constexpr u32 LANES = 8;         // accumulators, and words of a stripe
constexpr u32 STRIPE = 64;       // bytes
constexpr u32 ROUND = 1024;      // bytes: 16 stripes, so many as the secret has keys for
constexpr u32 SHORT = 240;       // bytes: up to here the specification has other algorithms
constexpr u32 WARP = 32;         // threads
constexpr u32 EVERYONE = ~0U;    // the mask of a whole warp
constexpr u32 SUMMERS = 8;       // warps
constexpr u32 ROUNDS_EACH = 4;   // times 8 sums: one for each thread of a warp, see `gathered`
constexpr u32 BATCH = SUMMERS * ROUNDS_EACH;
constexpr u32 THREADS = (SUMMERS + 1) * WARP;

struct Halves {
    u64 low, high;
};

// A little-endian word, as the device has them, wherever it begins.
__device__ __forceinline__ u64 word(const u8* at) {
    if ((u64)at % 8 == 0) return *(const u64*)at;
    u64 value = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) value = value << 8 | at[i];
    return value;
}

__device__ __forceinline__ u32 half_word(const u8* at) {
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

__device__ __forceinline__ u32 swapped(u32 value) {
    return value >> 24 | (value >> 8 & 0xFF00U) | (value << 8 & 0xFF0000U) | value << 24;
}

__device__ __forceinline__ u64 swapped(u64 value) {
    return (u64)swapped((u32)value) << 32 | swapped((u32)(value >> 32));
}

// Both halves of the product of 128 bits, one xor the other.
__device__ __forceinline__ u64 folded(u64 a, u64 b) {
    return a * b ^ __umul64hi(a, b);
}

__device__ __forceinline__ u64 avalanche(u64 value) {
    value = (value ^ value >> 37) * PRIME_MX1;
    return value ^ value >> 32;
}

__device__ __forceinline__ u64 avalanche_xxh64(u64 value) {
    value = (value ^ value >> 33) * PRIME64_2;
    value = (value ^ value >> 29) * PRIME64_3;
    return value ^ value >> 32;
}

__device__ Halves digest_1_to_3(const u8* data, u32 length) {
    const u32 combined = data[length - 1] | length << 8 | (u32)data[0] << 16 | (u32)data[length / 2] << 24;
    const u32 turned = swapped(combined) << 13 | swapped(combined) >> 19;
    const u64 low = (half_word(SECRET) ^ half_word(SECRET + 4)) ^ combined;
    const u64 high = (half_word(SECRET + 8) ^ half_word(SECRET + 12)) ^ turned;
    return {avalanche_xxh64(low), avalanche_xxh64(high)};
}

__device__ Halves digest_4_to_8(const u8* data, u32 length) {
    const u64 combined = half_word(data) | (u64)half_word(data + length - 4) << 32;
    const u64 value = word(SECRET + 16) ^ word(SECRET + 24) ^ combined;
    const u64 factor = PRIME64_1 + (length << 2);
    u64 low = value * factor;
    const u64 high = __umul64hi(value, factor) + (low << 1);
    low ^= high >> 3;
    low = (low ^ low >> 35) * PRIME_MX2;
    return {low ^ low >> 28, avalanche(high)};
}

__device__ Halves digest_9_to_16(const u8* data, u32 length) {
    const u64 first = word(data), last = word(data + length - 8);
    const u64 value = word(SECRET + 32) ^ word(SECRET + 40) ^ first ^ last;
    const u64 other = word(SECRET + 48) ^ word(SECRET + 56) ^ last;
    u64 low = value * PRIME64_1 + ((u64)(length - 1) << 54);
    u64 high = __umul64hi(value, PRIME64_1) + (other & 0xFFFFFFFF00000000ULL) + (other & 0xFFFFFFFFU) * PRIME32_2;
    low ^= swapped(high);
    high = __umul64hi(low, PRIME64_2) + high * PRIME64_2;
    return {avalanche(low * PRIME64_2), avalanche(high)};
}

__device__ void mix(Halves& sums, const u8* first, const u8* second, const u8* key) {
    const u64 a = word(first), b = word(first + 8), c = word(second), d = word(second + 8);
    sums.low = (sums.low + folded(a ^ word(key), b ^ word(key + 8))) ^ (c + d);
    sums.high = (sums.high + folded(c ^ word(key + 16), d ^ word(key + 24))) ^ (a + b);
}

__device__ Halves digest_17_to_240(const u8* data, u32 length) {
    Halves sums = {length * PRIME64_1, 0};
    if (length <= 128) {
        for (u32 i = (length - 1) / 32 + 1; i-- > 0;) {
            mix(sums, data + 16 * i, data + length - 16 * i - 16, SECRET + 32 * i);
        }
    } else {
        for (u32 i = 0; i < length / 32; ++i) {
            if (i == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
            mix(sums, data + 32 * i, data + 32 * i + 16, SECRET + (i < 4 ? 32 * i : 32 * (i - 4) + 3));
        }
        if (length / 32 == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
        mix(sums, data + length - 16, data + length - 32, SECRET + 103);
    }
    const u64 high = sums.low * PRIME64_1 + sums.high * PRIME64_4 + length * PRIME64_2;
    return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

// One thread's work: a buffer has one such block at most, its last.
__device__ __noinline__ Halves digest_of_short(const u8* data, u32 length) {
    if (length <= 3) return digest_1_to_3(data, length);
    if (length <= 8) return digest_4_to_8(data, length);
    if (length <= 16) return digest_9_to_16(data, length);
    return digest_17_to_240(data, length);
}

__device__ __forceinline__ u64 product(u64 data, u64 key) {
    const u64 value = data ^ key;
    return (value & 0xFFFFFFFFU) * (value >> 32);
}

__device__ __forceinline__ u64 initial(u32 lane) {
    switch (lane) {
        case 0: return PRIME32_3;
        case 1: return PRIME64_1;
        case 2: return PRIME64_2;
        case 3: return PRIME64_3;
        case 4: return PRIME64_4;
        case 5: return PRIME32_2;
        case 6: return PRIME64_5;
        default: return PRIME32_1;
    }
}

// Adds up what eight threads have, those whose numbers agree in the lowest two bits. Instead of giving all of the sums
// to all of them it leaves one to each: whenever two exchange, each gives away the half that is to be the other's. Of
// the eight sums' numbers, the thread's bits 4, 3 and 2 are the bits 2, 1 and 0.
__device__ __forceinline__ u64 gathered(u64 (&parts)[2 * ROUNDS_EACH]) {
#pragma unroll
    for (u32 half = ROUNDS_EACH; half > 0; half /= 2) {
        const u32 distance = 4 * half;
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (u32 i = 0; i < half; ++i) {
            const u64 given = upper ? parts[i] : parts[half + i];
            const u64 kept = upper ? parts[half + i] : parts[i];
            parts[i] = kept + __shfl_xor_sync(EVERYONE, given, distance);
        }
    }
    return parts[0];
}

// The sum of the stripes behind the last round that is scrambled, and of the last 64 bytes, for the thread's lane.
// The fourth parts of a warp share the stripes; all have the sum.
__device__ __forceinline__ u64 sum_of_the_rest(const u8* block, u32 length) {
    const u32 thread = threadIdx.x % WARP, lane = thread % LANES;
    const u32 stripes = (length - 1) % ROUND / STRIPE;
    u64 sum = 0;
#pragma unroll 1
    for (u32 n = thread / LANES; n <= stripes; n += WARP / LANES) {
        const bool last = n == stripes;
        const u8* const stripe = last ? block + length - STRIPE : block + (length - 1) / ROUND * ROUND + n * STRIPE;
        const u8* const key = SECRET + (last ? SECRET_BYTES - STRIPE - 7 : 8 * n);
        sum += product(word(stripe + 8 * lane), word(key + 8 * lane)) + word(stripe + 8 * (lane ^ 1));
    }
    sum += __shfl_xor_sync(EVERYONE, sum, 8);
    return sum + __shfl_xor_sync(EVERYONE, sum, 16);
}

// What is behind the last round that is scrambled, by one warp.
__device__ __forceinline__ void copy_the_rest(const u8* block, u32 length, u8* copy) {
    const u32 thread = threadIdx.x % WARP, whole = length / sizeof(ulonglong2) * sizeof(ulonglong2);
    u32 at = (length - 1) / ROUND * ROUND + thread * sizeof(ulonglong2);
#pragma unroll 1
    for (; at < whole; at += WARP * sizeof(ulonglong2)) *(ulonglong2*)(copy + at) = *(const ulonglong2*)(block + at);
    if (whole + thread < length) copy[whole + thread] = block[whole + thread];
}

// What a thread block does: see the kernels below. `copy` is where the buffer is copied to, if it is; `sums` is shared.
template <bool COPIES>
__device__ __forceinline__ void digest_block(const u8* __restrict__ data, u64 nbytes, u64 block_bytes,
                                             u64* __restrict__ digests, u8* __restrict__ copy,
                                             u64 (&sums)[2][BATCH][LANES]) {
    const u64 begin = blockIdx.x * block_bytes;
    const u8* const block = data + begin;
    const u32 length = (u32)(nbytes - begin < block_bytes ? nbytes - begin : block_bytes);
    u64* const digest = digests + 2 * (u64)blockIdx.x;
    if (COPIES) copy += begin;
    if (length <= SHORT) {
        if (COPIES) {
            if (threadIdx.x < length) copy[threadIdx.x] = block[threadIdx.x];
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            const Halves halves = digest_of_short(COPIES ? copy : block, length);
            digest[0] = swapped(halves.high);
            digest[1] = swapped(halves.low);
        }
        return;
    }

    const u32 warp = threadIdx.x / WARP, thread = threadIdx.x % WARP, lane = thread % LANES;
    const bool summer = warp < SUMMERS;
    const u32 rounds = (length - 1) / ROUND;  // the last one is none of them, whole or not: it is not scrambled

    // A summer: which of its keys belong to its pieces, and where in a batch it puts its sum.
    const u64* const keys = (const u64*)SECRET + thread / 4 + 2 * (thread % 4);
    const u64 early_even = keys[0], early_odd = keys[1], late_even = keys[8], late_odd = keys[9];
    const u32 place = (warp * ROUNDS_EACH + thread / 8) * LANES + 2 * (thread % 4) + thread / 4 % 2;
    // The chain: four times the same, as a warp has four times as many threads as there are accumulators.
    const u64 scramble_key = ((const u64*)SECRET)[(SECRET_BYTES - STRIPE) / 8 + lane];
    u64 accumulator = initial(lane), rest = 0;

    if (!summer) {  // here, where it waits for the first batch
        if (COPIES) {
            copy_the_rest(block, length, copy);
        } else {
            rest = sum_of_the_rest(block, length);
        }
    }
    for (u32 first = 0; first < rounds; first += BATCH) {
        u64* const batch = sums[first / BATCH % 2][0];
        const u32 mine = first + warp * ROUNDS_EACH;
        if (summer && mine < rounds) {
            // 16 bytes of a stripe, and of the one 8 stripes later. All are asked for before one is used: the
            // compiler does so if it may take 64 registers; fewer, and it asks for half of them at a time. Nobody takes
            // the sums of rounds that are not there, so any will do.
            ulonglong2 early[ROUNDS_EACH], late[ROUNDS_EACH];
            const ulonglong2* const at = (const ulonglong2*)(block + (u64)mine * ROUND) + thread;
#pragma unroll
            for (u32 k = 0; k < ROUNDS_EACH; ++k) {
                const ulonglong2* const round = at + (mine + k < rounds ? k : 0) * (ROUND / sizeof(ulonglong2));
                early[k] = round[0];
                late[k] = round[WARP];
            }
            if (COPIES) {
                ulonglong2* const to = (ulonglong2*)(copy + (u64)mine * ROUND) + thread;
#pragma unroll
                for (u32 k = 0; k < ROUNDS_EACH; ++k) {
                    if (mine + k >= rounds) break;
                    to[k * (ROUND / sizeof(ulonglong2))] = early[k];
                    to[k * (ROUND / sizeof(ulonglong2)) + WARP] = late[k];
                }
            }
            u64 parts[2 * ROUNDS_EACH];
#pragma unroll
            for (u32 k = 0; k < ROUNDS_EACH; ++k) {
                const ulonglong2 a = early[k], b = late[k];
                parts[2 * k] = product(a.x, early_even) + a.y + product(b.x, late_even) + b.y;
                parts[2 * k + 1] = product(a.y, early_odd) + a.x + product(b.y, late_odd) + b.x;
            }
            batch[place] = gathered(parts);
        }
        __syncthreads();  // one is enough: nobody writes to this half before the chain came to the next
        if (!summer) {
            const u32 count = rounds - first < BATCH ? rounds - first : BATCH;
#pragma unroll 8
            for (u32 k = 0; k < count; ++k) {
                accumulator += batch[k * LANES + lane];
                accumulator = (accumulator ^ accumulator >> 47 ^ scramble_key) * PRIME32_1;
            }
        }
    }
    if (COPIES) {  // of what was copied: nobody else writes there, and each byte of `data` is read once
        __syncthreads();
        if (!summer) rest = sum_of_the_rest(copy, length);
    }
    if (summer) return;

    // The fourth parts merge into the lower half, the higher, the lower and the higher.
    accumulator += rest;
    const bool higher = thread & LANES;
    const u64 mixed = accumulator ^ word(SECRET + (higher ? SECRET_BYTES - STRIPE - 11 : 11) + 8 * lane);
    u64 merged = folded(mixed, __shfl_xor_sync(EVERYONE, mixed, 1));
    merged += __shfl_xor_sync(EVERYONE, merged, 2);
    merged += __shfl_xor_sync(EVERYONE, merged, 4);
    merged = avalanche(merged + (higher ? ~(length * PRIME64_2) : length * PRIME64_1));
    if (thread == 0) digest[1] = swapped(merged);
    if (thread == LANES) digest[0] = swapped(merged);
}

// `data` is aligned to 16 bytes, and `block_bytes` a multiple of that below 4 GiB. One thread block of THREADS for each
// block; `digests` has 16 bytes for each, aligned to 8: in canonical order, so its higher half first, big-endian.
extern "C" __global__ void __launch_bounds__(THREADS, 3)  // of 72 registers at most
digest_blocks(const u8* __restrict__ data, u64 nbytes, u64 block_bytes, u64* __restrict__ digests) {
    __shared__ u64 sums[2][BATCH][LANES];
    digest_block<false>(data, nbytes, block_bytes, digests, nullptr, sums);
}

// The same, and `copy`, aligned to 16 bytes, gets what is in `data`.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
copy_blocks(const u8* __restrict__ data, u64 nbytes, u64 block_bytes, u64* __restrict__ digests, u8* __restrict__ copy) {
    __shared__ u64 sums[2][BATCH][LANES];
    digest_block<true>(data, nbytes, block_bytes, digests, copy, sums);
}
