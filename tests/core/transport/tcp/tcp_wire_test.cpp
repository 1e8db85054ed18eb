// The pure parts of TCP: digests, checksums, frames, addresses, the choice of an interface.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "base/descriptors.h"
#include "child.h"
#include "test.h"
#include "transport/matching/frame.h"
#include "transport/matching/session.h"
#include "transport/tcp/address.h"
#include "transport/tcp/secret.h"

namespace syncengine::tcp {

using testing::contains;

namespace {

std::string hex(const std::string& bytes) {
  std::string text;
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

Ip ip4(uint8_t a, uint8_t b, uint8_t c, uint8_t d) { return {.v6 = false, .bytes = {a, b, c, d}}; }

Ip ip6(uint8_t first, uint8_t second, uint8_t last) {
  Ip ip{.v6 = true};
  ip.bytes[0] = first, ip.bytes[1] = second, ip.bytes[15] = last;
  return ip;
}

Address example() {
  return {.ip = ip4(10, 0, 0, 1), .port = 5000, .network = std::string(32, 'n'), .key = std::string(32, 'k')};
}

}  // namespace

// FIPS 180-4 examples.
TEST(sha256_vectors) {
  CHECK_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex(sha256(std::string(1000000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, cases 1 to 4, 6 and 7.
TEST(hmac_sha256_vectors) {
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char byte = 1; byte <= 25; ++byte) counting += byte;
  CHECK_EQ(hex(hmac_sha256(counting, std::string(50, '\xcd'))),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                           "This is a test using a larger than block-size key and a larger than block-size data. The "
                           "key needs to be hashed before being used by the HMAC algorithm.")),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
  CHECK(equal_digests("same", "same") && !equal_digests("same", "sama") && !equal_digests("same", "sam"));
}

// RFC 3720, B.4; and the two ways agree at every length and alignment.
TEST(crc32c_vectors) {
  auto of = [](const std::string& text) {
    return crc32c(reinterpret_cast<const std::byte*>(text.data()), text.size());
  };
  std::string up, down;
  for (char byte = 0; byte < 32; ++byte) up += byte, down = byte + down;
  CHECK_EQ(of(std::string(32, '\0')), 0x8a9136aau);
  CHECK_EQ(of(std::string(32, '\xff')), 0x62a8ab43u);
  CHECK_EQ(of(up), 0x46dd794eu);
  CHECK_EQ(of(down), 0x113fdb5cu);
  CHECK_EQ(of(""), 0u);
  std::mt19937 random(1);
  std::vector<std::byte> data(300);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t bytes = 0; begin + bytes <= 100; ++bytes)
      CHECK_EQ(crc32c(data.data() + begin, bytes), crc32c_portable(data.data() + begin, bytes));
  }
}

TEST(codec_gives_zeros_past_the_end) {
  std::string text = Writer().u8(1).u16(0x203).u32(0x4050607).u64(0x8090a0b0c0d0e0f).bytes("end").text();
  CHECK_EQ(hex(text.substr(0, 7)), "01030207060504");
  Reader reader(text);
  CHECK_EQ(reader.u8(), 1);
  CHECK_EQ(reader.u16(), 0x203);
  CHECK_EQ(reader.u32(), 0x4050607u);
  CHECK_EQ(reader.u64(), 0x8090a0b0c0d0e0fu);
  CHECK(!reader.whole());
  CHECK_EQ(reader.bytes(3), "end");
  CHECK(reader.whole());
  CHECK_EQ(reader.u8(), 0);
  CHECK(!reader.whole());
  Reader shorter(std::string_view(text).substr(0, 3));
  CHECK_EQ(shorter.u64(), 0u);
  CHECK_EQ(shorter.u8(), 0);  // nothing after a failure
  CHECK_EQ(Reader("ab").bytes(3), std::string(3, '\0'));
}

TEST(frames_come_back) {
  const Frame control[] = {{.kind = Kind::Heartbeat},
                           {.kind = Kind::Goodbye},
                           {.kind = Kind::Goodbye, .size = 1},
                           {.kind = Kind::Message, .payload = 65536},
                           {.kind = Kind::Abort, .payload = 10, .size = 2},
                           {.kind = Kind::Ready, .tag = ~uint64_t{0}, .handle = 1, .size = 1 << 20},
                           {.kind = Kind::Ask, .tag = 5},
                           {.kind = Kind::Withdrawn, .tag = 5, .handle = ~uint64_t{0}, .size = ~uint32_t{0}},
                           {.kind = Kind::Credit, .size = kEagerWindow}};
  const Frame data[] = {{.kind = Kind::Eager, .payload = kEagerBytes, .checksum = 3, .tag = 9},
                        {.kind = Kind::Eager},
                        {.kind = Kind::Chunk, .payload = kChunkBytes, .handle = 2, .offset = 3 * kChunkBytes},
                        {.kind = Kind::Chunk, .payload = 1, .checksum = 1, .handle = 1}};
  for (const Frame& frame : control) {
    CHECK_EQ(encode(frame, false).size(), kFrameBytes);
    CHECK(decode(encode(frame, false), Channel::Control, false) == frame);
    CHECK(!decode(encode(frame, false), Channel::Data, false));
  }
  for (const Frame& frame : data) {
    CHECK(decode(encode(frame, false), Channel::Data, false) == frame);
    CHECK(!decode(encode(frame, false), Channel::Control, false));
  }
}

// All bits of a header, and of what follows; one error says so, and does not advise what is on.
TEST(checksums_cover_headers_and_messages) {
  for (const Frame& frame : {Frame{.kind = Kind::Ready, .tag = 5, .handle = 1, .size = 17000},
                             Frame{.kind = Kind::Message, .payload = 5, .checksum = 7}}) {
    const std::string good = encode(frame, true);
    CHECK_EQ(good.size(), kFrameBytes);
    CHECK(decode(good, Channel::Control, true) == frame);
    CHECK(!decode(good, Channel::Control, false));
    for (size_t bit = 0; bit < 8 * kFrameBytes; ++bit) {
      std::string bad = good;
      bad[bit / 8] ^= static_cast<char>(1 << bit % 8);
      CHECK(!decode(bad, Channel::Control, true));
    }
  }
  for (bool checksum : {true, false}) {
    Shared shared{.rank = 0, .checksum = checksum};
    matching::Session session(shared, {}, 1);
    session.tell("hello");
    const Frame frame = *decode(session.out.substr(0, kFrameBytes), Channel::Control, checksum);
    session.on_control(frame, "hello");
    if (!checksum) {
      session.on_control(frame, "hellp");
      continue;
    }
    const std::string error = CHECK_THROWS(session.on_control(frame, "hellp"), ErrorKind::PeerLost);
    CHECK(contains(error, "checksum differs") && !contains(error, "SYNCENGINE_CHECKSUM"));
    CHECK_EQ(shared.heard.size(), 1u);
  }
}

TEST(frames_out_of_bounds_are_refused) {
  const Frame control[] = {{.kind = Kind::Heartbeat, .payload = 1},
                           {.kind = Kind::Message, .payload = 65537},
                           {.kind = Kind::Abort, .payload = kMaxAbort + 1},
                           {.kind = Kind::Abort, .size = static_cast<uint32_t>(kLastErrorKind) + 1},
                           {.kind = Kind::Ready, .handle = 0},
                           {.kind = Kind::Ready, .handle = 1, .size = (1 << 20) + 1},
                           {.kind = Kind::Ready, .payload = 1, .handle = 1},
                           {.kind = Kind::Ask, .tag = 5, .size = 1},
                           {.kind = Kind::Withdrawn, .tag = 5, .handle = 4},
                           {.kind = Kind::Withdrawn, .payload = 1, .tag = 5, .handle = 5},
                           {.kind = Kind::Credit, .size = 0},
                           {.kind = Kind::Credit, .size = kEagerWindow + 1}};
  const Frame data[] = {{.kind = Kind::Eager, .payload = kEagerBytes + 1},
                        {.kind = Kind::Eager, .handle = 1},
                        {.kind = Kind::Chunk, .payload = 1},
                        {.kind = Kind::Chunk, .payload = kChunkBytes + 1, .handle = 1},
                        {.kind = Kind::Chunk, .payload = 1, .handle = 1, .offset = 1},
                        {.kind = Kind::Chunk, .payload = 1, .handle = 1, .offset = 4 * kChunkBytes},
                        {.kind = Kind::Chunk, .payload = 1, .handle = 1, .offset = 0xfffc0000}};
  for (const Frame& frame : control) CHECK(!decode(encode(frame, false), Channel::Control, false));
  for (const Frame& frame : data) CHECK(!decode(encode(frame, false), Channel::Data, false));
  std::string good = encode({.kind = Kind::Heartbeat}, false);
  CHECK(!decode(good.substr(1), Channel::Control, false));
  CHECK(!decode(good + "x", Channel::Control, false));
}

TEST(addresses_come_back) {
  Address address = example();
  CHECK(decode_address(3, encode(address)) == address);
  address.ip = ip6(0xfd, 1, 2), address.has_secret = true;
  CHECK(decode_address(3, encode(address)) == address);
  CHECK(encode(address).size() <= 256);
  for (size_t bytes = 0; bytes < encode(address).size(); ++bytes) {
    std::string part = encode(address).substr(0, bytes);
    CHECK(contains(CHECK_THROWS(decode_address(3, part), ErrorKind::InvalidUsage), "rank 3"));
  }
}

TEST(addresses_that_do_not_fit_are_named) {
  Address own = example(), other = example();
  check_fit(0, own, 3, other);
  other = example(), other.has_secret = true;
  CHECK(contains(CHECK_THROWS(check_fit(0, own, 3, other), ErrorKind::InvalidUsage), "rank 0 has no secret"));
  CHECK(contains(CHECK_THROWS(check_fit(3, other, 0, own), ErrorKind::InvalidUsage), "rank 0 has no secret"));
  other = example(), other.ip = ip4(127, 0, 0, 1);
  check_fit(0, own, 3, other);  // the same loopback
  other.network = std::string(32, 'm');
  CHECK(contains(CHECK_THROWS(check_fit(0, own, 3, other), ErrorKind::InvalidUsage), "rank 3 listens on loopback"));
  other.ip = ip6(0xfd, 0, 1);
  CHECK(contains(CHECK_THROWS(check_fit(0, own, 3, other), ErrorKind::InvalidUsage), "same kind of address"));
}

TEST(interfaces_are_chosen_as_gloo_and_nccl_spell_them) {
  const std::vector<Interface> all = {
      {"lo", ip4(127, 0, 0, 1)},  {"eth0", ip6(0xfe, 0x80, 1)}, {"eth0", ip6(0xfd, 0, 10)},
      {"eth0", ip4(10, 0, 0, 1)}, {"eth01", ip4(10, 0, 1, 1)},  {"docker0", ip4(172, 17, 0, 1)},
      {"ib0", ip6(0xfd, 0, 20)},  {"lo", ip6(0, 0, 1)},         {"ll0", ip6(0xfe, 0x80, 2)}};
  auto chosen = [&](const std::string& wanted) { return choose_ip(wanted, all).text(); };
  CHECK_EQ(chosen(""), "127.0.0.1");
  CHECK_EQ(chosen("eth"), "10.0.0.1");
  CHECK_EQ(chosen("eth01"), "10.0.1.1");
  CHECK_EQ(chosen("=eth0"), "10.0.0.1");
  CHECK_EQ(chosen("ib,eth"), "fd00::14");
  CHECK_EQ(chosen("nothing, docker"), "172.17.0.1");
  CHECK_EQ(chosen("^docker,eth"), "fd00::14");
  CHECK_EQ(chosen("^eth"), "172.17.0.1");
  CHECK_EQ(chosen("^=eth"), "10.0.0.1");
  CHECK_EQ(chosen("fd00::a"), "fd00::a");
  CHECK_EQ(chosen("127.0.0.1"), "127.0.0.1");
  std::string text = CHECK_THROWS(chosen("wlan"), ErrorKind::InvalidUsage);
  CHECK(contains(text, "'wlan'") && contains(text, "eth0 (10.0.0.1)"));
  CHECK_THROWS(chosen("=eth"), ErrorKind::InvalidUsage);
  CHECK_THROWS(chosen("ll0"), ErrorKind::InvalidUsage);
  CHECK(ip4(169, 254, 1, 1).is_link_local() && !ip4(10, 0, 0, 1).is_link_local());
  CHECK(!local_interfaces().empty());
}

TEST(secrets_are_read_and_never_shown) {
  CHECK_EQ(load_secret("", ""), "");
  CHECK_EQ(load_secret("0123456789abcdef", ""), "0123456789abcdef");
  CHECK(!contains(CHECK_THROWS(load_secret("k3y", ""), ErrorKind::InvalidUsage), "k3y"));
  CHECK_THROWS(load_secret("0123456789abcdef", "/file"), ErrorKind::InvalidUsage);
  CHECK(contains(CHECK_THROWS(load_secret("", "/no/such/file"), ErrorKind::InvalidUsage), "/no/such/file"));
}

TEST(secret_files_are_read_and_those_that_others_may_read_are_warned_of) {
  for (mode_t mode : {0600, 0640, 0604}) {
    char name[] = "/tmp/syncengine-secret-XXXXXX";
    UniqueFd file(mkstemp(name));
    CHECK(write(file.get(), "  a secret in a file\n", 21) == 21 && fchmod(file.get(), mode) == 0);
    const std::string said = testing::stderr_of_child([&] { CHECK_EQ(load_secret("", name), "a secret in a file"); });
    unlink(name);
    CHECK_EQ(contains(said, "the group or others may read SYNCENGINE_SECRET_FILE"), mode != 0600);
    CHECK(!contains(said, "a secret in a file"));
  }
}

TEST(pair_keys_are_the_same_on_both_sides_and_depend_on_everything) {
  Address a = example(), b = example();
  b.key = std::string(32, 'b');
  PairKeys keys = pair_keys(0, a, 3, b, "secret");
  PairKeys same = pair_keys(3, b, 0, a, "secret");
  CHECK(keys.ticket == same.ticket && keys.proof == same.proof && keys.ticket != keys.proof);
  CHECK(pair_keys(0, a, 3, b, "other").proof != keys.proof);
  CHECK(pair_keys(0, a, 2, b, "secret").proof != keys.proof);
  b.key[0] = 'x';
  CHECK(pair_keys(0, a, 3, b, "secret").proof != keys.proof);
  CHECK(pair_keys(0, a, 3, b, "secret").ticket != keys.ticket);
}

}  // namespace syncengine::tcp
