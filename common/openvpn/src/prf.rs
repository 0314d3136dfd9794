//! The pseudo-random function of TLS 1.0 (RFC 2246, section 5). Peers older than 2.6 derive the keys of the
//! data channel with this function; peers that export keys from TLS do not need it.

#[cfg(test)]
mod tests;

use hmac::digest::{Key, KeyInit};
use hmac::{Hmac, Mac};
use md5::Md5;
use sha1::Sha1;

/// Block size of both hashes in bytes, and thus the longest key that HMAC uses unchanged.
const BLOCK: usize = 64;

/// Fills `out` with P_MD5 xor P_SHA1 of `label` followed by `seed`. Each hash is keyed with one half of
/// `secret`; in a secret of odd length the halves share the middle byte.
pub(crate) fn tls1_prf<const S: usize>(
    secret: &[u8; S],
    label: &[u8],
    seed: &[&[u8]],
    out: &mut [u8],
) {
    const {
        assert!(
            S > 0 && S <= 2 * BLOCK,
            "each half has to fit into one block of the hashes"
        )
    };
    let half = S.div_ceil(2);
    let update = |mac: &mut dyn FnMut(&[u8])| {
        mac(label);
        seed.iter().for_each(|part| mac(part));
    };
    out.fill(0);
    xor_p_hash::<Hmac<Md5>>(secret.iter().take(half), update, out);
    xor_p_hash::<Hmac<Sha1>>(secret.iter().skip(S - half), update, out);
}

/// Computes `out ^= P_hash`. P_hash is HMAC(A(1) + seed), HMAC(A(2) + seed), ..., with A(0) = seed and A(i) =
/// HMAC(A(i - 1)).
fn xor_p_hash<'a, M: Mac + KeyInit + Clone>(
    secret: impl Iterator<Item = &'a u8>,
    seed: impl Fn(&mut dyn FnMut(&[u8])),
    out: &mut [u8],
) {
    let mut key = Key::<M>::default();
    key.iter_mut()
        .zip(secret)
        .for_each(|(to, from)| *to = *from);
    let keyed = <M as KeyInit>::new(&key);

    let mut mac = keyed.clone();
    seed(&mut |part| mac.update(part));
    let mut a = mac.finalize().into_bytes();
    for chunk in out.chunks_mut(a.len()) {
        let mut mac = keyed.clone();
        mac.update(&a);
        seed(&mut |part| mac.update(part));
        let hash = mac.finalize().into_bytes();
        chunk
            .iter_mut()
            .zip(hash)
            .for_each(|(byte, hash)| *byte ^= hash);

        let mut mac = keyed.clone();
        mac.update(&a);
        a = mac.finalize().into_bytes();
    }
}
