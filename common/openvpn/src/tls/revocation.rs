//! CAs with the same name, as in a rotation of a CA, and their CRLs.
//!
//! webpki uses the first CRL with the name of a certificate's issuer, and refuses the certificate if another key has signed
//! this CRL. CAs of one name and different keys are therefore separated into groups. Each group has a verifier with the
//! CRLs of its own CAs.

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls_pki_types::{
    CertificateDer, CertificateRevocationListDer, SignatureVerificationAlgorithm,
};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

/// CAs of different names or of the same key, and the CRLs for the certificates below them.
#[derive(Default)]
pub(super) struct Group {
    pub(super) roots: Vec<CertificateDer<'static>>,
    pub(super) crls: Vec<CertificateRevocationListDer<'static>>,
    pub(super) authorities: Vec<Authority>,
}

/// Name and public key of a CA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Authority {
    name: Vec<u8>,
    key: Vec<u8>,
}

/// Separates CAs of one name and different keys, if there are CRLs. The first group has a CA of each name.
///
/// A group lacks a CRL only if a CA of another group signed the CRL and a CA of this group has the same name. A CRL that no
/// CA signed is in all groups, after the signed CRLs: the issuer may be an intermediate CA. A damaged CRL must not make
/// certificates valid.
pub(super) fn groups(
    roots: Vec<CertificateDer<'static>>,
    crls: &[CertificateRevocationListDer<'static>],
    algorithms: WebPkiSupportedAlgorithms,
) -> Vec<Group> {
    let mut groups = vec![Group::default()];
    for root in roots {
        let authority = Authority::new(&root);
        let differs = |other: &Authority| {
            let own = authority.as_ref();
            own.is_some_and(|own| other.name == own.name && other.key != own.key)
        };
        let conflicts = |group: &Group| !crls.is_empty() && group.authorities.iter().any(differs);
        let index = groups.iter().position(|group| !conflicts(group));
        let index = index.unwrap_or_else(|| {
            groups.push(Group::default());
            groups.len() - 1
        });
        if let Some(group) = groups.get_mut(index) {
            group.roots.push(root);
            group.authorities.extend(authority);
        }
    }
    let mut unsigned = vec![Vec::new(); groups.len()];
    for crl in crls {
        let parsed = CertificateRevocationList::from_der(crl).ok();
        // True if the CA with the name of the CRL's issuer has signed the CRL; `None` without such a CA.
        let is_signed = |group: &Group| {
            let (_, crl) = parsed.as_ref()?;
            let mut authorities = group.authorities.iter();
            let issuer = authorities.find(|authority| authority.name == crl.issuer().as_raw())?;
            Some(issuer.has_signed(crl, algorithms))
        };
        let signed: Vec<_> = groups.iter().map(is_signed).collect();
        let is_known = signed.contains(&Some(true));
        for ((group, unsigned), signed) in groups.iter_mut().zip(&mut unsigned).zip(signed) {
            match signed {
                Some(true) => group.crls.push(crl.clone()),
                Some(false) if is_known => {}
                _ => unsigned.push(crl.clone()),
            }
        }
    }
    for (group, mut unsigned) in groups.iter_mut().zip(unsigned) {
        group.crls.append(&mut unsigned);
    }
    groups
}

// === impl Authority ===

impl Authority {
    pub(super) fn new(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        Some(Self {
            name: certificate.subject().as_raw().to_vec(),
            key: certificate.public_key().subject_public_key.data.to_vec(),
        })
    }

    /// Checks the signature with each algorithm. webpki checks the algorithm once it uses the CRL.
    fn has_signed(
        &self,
        crl: &CertificateRevocationList<'_>,
        algorithms: WebPkiSupportedAlgorithms,
    ) -> bool {
        let (message, signature) = (crl.tbs_cert_list.as_ref(), &crl.signature_value.data);
        let verify = |algorithm: &&dyn SignatureVerificationAlgorithm| {
            let verified = algorithm.verify_signature(&self.key, message, signature);
            verified.is_ok()
        };
        algorithms.all.iter().any(verify)
    }
}
