#include "transport/tcp/secret.h"

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>

#include "base/error.h"
#include "base/say.h"
#include "transport/matching/frame.h"

namespace syncengine::tcp {

namespace {

constexpr size_t kBlockBytes = 64;

// SHA-256's constants: the first 32 bits of the fractional parts of the cube roots of the first 64 primes, and of the
// square roots of the first 8.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr std::array<uint32_t, 8> kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t big_endian(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

void compress(std::array<uint32_t, 8>& state, const char* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    uint32_t choice = (e & f) ^ (~e & g);
    uint32_t first = h + s1 + choice + kRound[i] + w[i];
    uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + s0 + majority;
  }
  const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += mixed[i];
}

}  // namespace

std::string sha256(std::string_view message) {
  std::array<uint32_t, 8> state = kStart;
  size_t whole = message.size() / kBlockBytes * kBlockBytes;
  for (size_t i = 0; i < whole; i += kBlockBytes) compress(state, message.data() + i);

  // The last block is filled up with a one bit, zeros, and the length in bits.
  std::string rest(message.substr(whole));
  rest += '\x80';
  while (rest.size() % kBlockBytes != kBlockBytes - 8) rest += '\0';
  uint64_t bits = uint64_t{message.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) rest += static_cast<char>(bits >> shift);
  for (size_t i = 0; i < rest.size(); i += kBlockBytes) compress(state, rest.data() + i);

  std::string digest;
  for (uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift);
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string block = key.size() > kBlockBytes ? sha256(key) : std::string(key);
  block.resize(kBlockBytes, '\0');
  std::string inner = block, outer = block;
  for (char& byte : inner) byte ^= 0x36;
  for (char& byte : outer) byte ^= 0x5c;
  return sha256(outer + sha256(inner.append(message)));
}

bool equal_digests(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string load_secret(const std::string& secret, const std::string& file) {
  if (!secret.empty() && !file.empty())
    throw Error(ErrorKind::InvalidUsage, "SYNCENGINE_SECRET and SYNCENGINE_SECRET_FILE are both set: set one");
  if (secret.empty() && file.empty()) return "";
  std::string value = secret;
  if (!file.empty()) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw_system_error("can't read SYNCENGINE_SECRET_FILE (" + file + ")", errno);
    constexpr const char* kSpace = " \t\r\n";
    value.assign(std::istreambuf_iterator<char>(stream), {});
    value.erase(0, value.find_first_not_of(kSpace));
    value.erase(value.find_last_not_of(kSpace) + 1);
    struct stat status{};
    if (stat(file.c_str(), &status) == 0 && (status.st_mode & (S_IRGRP | S_IROTH)) != 0)
      say("syncengine: the group or others may read SYNCENGINE_SECRET_FILE (" + file + "): chmod 600 it\n");
  }
  if (value.size() < kShortestSecret) {
    throw Error(ErrorKind::InvalidUsage,
                std::string(file.empty() ? "SYNCENGINE_SECRET" : "the secret in SYNCENGINE_SECRET_FILE") + " has " +
                    std::to_string(value.size()) + " bytes: give at least " + std::to_string(kShortestSecret) +
                    " (try: head -c 32 /dev/urandom | base64)");
  }
  return value;
}

PairKeys pair_keys(int rank, const Address& address, int other_rank, const Address& other, const std::string& secret) {
  if (other_rank < rank) return pair_keys(other_rank, other, rank, address, secret);
  std::string both = Writer().u32(rank).u32(other_rank).bytes(encode(address)).bytes(encode(other)).text();
  return {.ticket = hmac_sha256(both, "syncengine ticket"),
          .proof = hmac_sha256(secret, Writer().bytes("syncengine proof").bytes(both).text())};
}

}  // namespace syncengine::tcp
